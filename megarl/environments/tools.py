"""An environment of Python functions: the policy calls them, their results are the observations.

The JSON schemas of the tools come from the functions' type hints, defaults and Google-style docstrings.
"""

import asyncio
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any, Literal, Union

from megarl.data.images.decoding import MAX_BYTES, is_picture
from megarl.environments.protocol import (
    BaseEnvironment,
    Message,
    Observation,
    Task,
    ToolCall,
    Turn,
    called,
    image_bytes,
)
from megarl.tool_formats.written_calls import KINDS
from megarl.user_results import LateCall, is_generator, limited, number_of

MAX_RESULT_LENGTH = 100_000  # characters of a result; the rest is cut

_SIMPLE = {kinds[-1]: name for name, kinds in KINDS.items()}
_SECTION = re.compile(r"^(Args|Arguments|Returns|Raises|Yields|Example|Examples|Note|Notes):\s*$")


class ToolEnvironment(BaseEnvironment):
    """Answers each call of a turn with the function's result; the episode ends with a turn that calls nothing.

    A result is a text, an image (of Pillow, or its bytes), a list in which there are some, or a value of JSON.
    Errors of a call are text for the policy: an unknown tool, wrong arguments, an exception, a time-out.
    """

    def __init__(
        self,
        functions: Sequence[Callable],
        max_calls: int = 16,
        timeout: float = 30.0,
        reward: Callable[[Task, str], Any] | None = None,
    ):
        """`functions`: plain or async, with type hints and docstrings. They keep nothing between calls: an episode that
        is played again does not call them again. TypeError for one without hints, or that yields.

        `max_calls`: that are made of a turn; `timeout`: seconds of a call; `reward`: of (task, content of the last
        turn); None: 0, and the verifiers of `--reward` decide.
        """
        for function in functions:
            if is_generator(function):
                raise TypeError(f"the tool {function.__name__} yields; allowed is a function that returns its result")
        self._functions = {function.__name__: function for function in functions}
        self.tools = [schema_of(function) for function in functions]
        self._max_calls, self._timeout, self._reward = max_calls, timeout, reward
        self._task: Task | None = None

    def reset(self, task: Task) -> Observation:
        """The tools are rendered into the prompt; nothing else is added."""
        self._task = task
        return Observation()

    async def restore(self, task: Task, turns: list[Turn], observations: list[Observation]):
        """Calls nothing again: tools keep nothing between calls."""
        self._task = task

    async def step(self, turn: Turn) -> Observation:
        """Makes the calls of a turn, together."""
        if not turn.calls and not turn.errors:
            reward = 0.0 if self._reward is None else await called(self._reward, self._task, turn.content)
            return Observation(reward=reward, done=True)
        results = await asyncio.gather(*(self._result(index, call) for index, call in enumerate(turn.calls)))
        results = _within_limit(results)
        messages: list[Message] = [
            {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": result}
            for call, result in zip(turn.calls, results, strict=True)
        ]
        if turn.errors:
            wrong = "\n".join(f"Error: a tool call could not be read: {error}" for error in turn.errors)
            last = messages[-1] if messages else {"role": "user"}  # templates need the id of a call, and its name
            messages.append({**last, "content": wrong})
        return Observation(messages)

    async def _result(self, index: int, call: ToolCall) -> str | list[dict[str, Any]]:
        if index >= self._max_calls:
            return f"Error: at most {self._max_calls} calls are made of a turn"
        function = self._functions.get(call.name)
        if function is None:
            return f"Error: there is no tool {call.name[:100]!r}; there are: {', '.join(self._functions)}"
        if problem := self._problem(call):
            return f"Error: {problem}"
        try:
            result = await limited(called(function, **call.arguments), self._timeout)
            several = list(result) if isinstance(result, list | tuple) else [result]
            if not any(map(_is_image, several)):
                return _text(result)
            return [await _part(each) for each in several]
        except LateCall:
            return f"Error: no result within {self._timeout:g} seconds"
        except (Exception, SystemExit) as error:
            return " ".join(f"Error: {type(error).__name__}: {error}".split())[:2000]

    def _problem(self, call: ToolCall) -> str | None:
        """What is wrong with the arguments of a call, in words for the policy; None: nothing."""
        schema = next(tool["function"] for tool in self.tools if tool["function"]["name"] == call.name)["parameters"]
        for name in schema.get("required", []):
            if name not in call.arguments:
                return f"{call.name} needs the argument {name}"
        for name, value in call.arguments.items():
            if name not in schema["properties"]:
                return f"{call.name} has no argument {name[:100]!r}; it has: {', '.join(schema['properties'])}"
            if problem := mismatch(value, schema["properties"][name]):
                return f"the argument {name} of {call.name} {problem}"
        return None


def _is_image(value: Any) -> bool:
    return isinstance(value, bytes) or is_picture(value)


async def _part(value: Any) -> dict[str, Any]:
    """The part of a content with an image or a text of a result. UsageError for an image that cannot be read."""
    if _is_image(value):
        return {"type": "image", "image": await asyncio.to_thread(image_bytes, value)}
    return {"type": "text", "text": _text(value)}


def _text(result: Any) -> str:
    text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=_plain)
    return text[:MAX_RESULT_LENGTH]


def _within_limit(results: list[str | list[dict[str, Any]]]) -> list[str | list[dict[str, Any]]]:
    """Results of a turn; those with images beyond the bytes that an observation may have are errors for the policy."""
    found, total = [], 0
    for result in results:
        total += sum(len(part.get("image", b"")) for part in result) if isinstance(result, list) else 0
        is_within = isinstance(result, str) or total <= MAX_BYTES
        found.append(result if is_within else f"Error: the images of a turn have more than {MAX_BYTES:,} bytes")
    return found


def _plain(value: Any) -> Any:
    """A number of numpy or torch in a result, as JSON has it."""
    if number_of(value) is None:
        raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")
    return value.item() if hasattr(value, "item") else number_of(value)


# -- schemas -----------------------------------------------------------------------------------------------------------


def schema_of(function: Callable) -> dict[str, Any]:
    """The schema of a tool, as chat templates render it: `{"type": "function", "function": {…}}`.

    TypeError: a parameter has no type hint, or one that JSON cannot hold, or takes any number of values.
    """
    hints = typing.get_type_hints(function)
    text, arguments = _docstring(function)
    properties, required = {}, []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise TypeError(f"tool {function.__name__}: parameter {name} must be one that is given by its name")
        if name not in hints:
            raise TypeError(f"tool {function.__name__}: parameter {name} has no type hint")
        properties[name] = type_schema(hints[name], f"tool {function.__name__}: parameter {name}")
        if arguments.get(name):
            properties[name]["description"] = arguments[name]
        if parameter.default is parameter.empty:
            required.append(name)
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = required
    described = {"name": function.__name__, "description": text, "parameters": parameters}
    return {"type": "function", "function": described}


def type_schema(hint: Any, where: str) -> dict[str, Any]:
    """The schema of a type hint. TypeError, which begins with `where`, for one that JSON cannot hold."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint in _SIMPLE:
        return {"type": _SIMPLE[hint]}
    if hint is Any:
        return {}
    if origin is Literal:
        kinds = {type(value) for value in args}
        if len(kinds) == 1 and kinds <= {str, int, float, bool}:
            return {"type": _SIMPLE[kinds.pop()], "enum": list(args)}
    elif origin in (Union, types.UnionType):
        others = [type_schema(arg, where) for arg in args if arg is not type(None)]
        found = others[0] if len(others) == 1 else {"anyOf": others}
        return found | ({"nullable": True} if len(others) < len(args) else {})
    elif origin is list:
        return {"type": "array", "items": type_schema(args[0], where)}
    elif origin is dict:
        return {"type": "object", "additionalProperties": type_schema(args[1], where)}
    raise TypeError(f"{where} has the type {hint}, which JSON cannot hold")


def mismatch(value: Any, schema: dict[str, Any]) -> str | None:
    """Why a value of a call does not fit a parameter's schema, in words for the policy; None if it does."""
    if value is None and (schema.get("nullable") or schema.get("type") == "null"):
        return None
    if "anyOf" in schema:
        fits = any(mismatch(value, each) is None for each in schema["anyOf"])
        return None if fits else "fits none of its types"
    wanted = schema.get("type")
    is_other_bool = isinstance(value, bool) and wanted != "boolean"
    if wanted is not None and (not isinstance(value, KINDS.get(wanted, ())) or is_other_bool):
        return f"must be {wanted}, not {_SIMPLE.get(type(value), type(value).__name__)}"
    if "enum" in schema and value not in schema["enum"]:
        return f"must be one of {', '.join(map(repr, schema['enum']))}"
    if wanted == "array" and "items" in schema:
        return next(filter(None, (mismatch(item, schema["items"]) for item in value)), None)
    if wanted == "object" and isinstance(schema.get("additionalProperties"), dict):
        each = schema["additionalProperties"]
        return next(filter(None, (mismatch(item, each) for item in value.values())), None)
    return None


def _docstring(function: Callable) -> tuple[str, dict[str, str]]:
    """(text before the first section, descriptions of the arguments)."""
    lines = inspect.cleandoc(function.__doc__ or "").splitlines()
    first = next((i for i, line in enumerate(lines) if _SECTION.match(line)), len(lines))
    found: dict[str, str] = {}
    name, section = None, ""
    for line in lines[first:]:
        if match := _SECTION.match(line):
            section, name = match[1], None
        elif section in ("Args", "Arguments"):
            head = re.match(r"^ {2,8}(\w+)\s*(?:\([^)]*\))?:\s*(.*)$", line)
            if head and (name is None or not line.startswith(" " * 8)):
                name = head[1]
                found[name] = head[2].strip()
            elif name and line.strip():
                found[name] += " " + line.strip()
    return "\n".join(lines[:first]).strip(), found
