"""An environment of Python functions: the policy calls them, their results are the observations."""

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

from megarl.environments.protocol import BaseEnvironment, Message, Observation, Task, ToolCall, Turn, called
from megarl.environments.tool_schemas import mismatch, schema_of
from megarl.user_results import is_generator, number_of

MAX_RESULT_LENGTH = 100_000  # characters of a result; the rest is cut


class ToolEnvironment(BaseEnvironment):
    """Answers each call of a turn with the function's result; the episode ends with a turn that calls nothing.

    Errors of a call are text for the policy: an unknown tool, wrong arguments, an exception, a time-out.
    """

    def __init__(
        self, functions: Sequence[Callable], max_calls: int = 16, timeout: float = 30.0,
        reward: Callable[[Task, str], Any] | None = None,
    ):  # fmt: skip
        """
        Args:
            functions: plain or async, with type hints, and docstrings that describe their arguments. They keep nothing
                between calls: an episode that is played again does not call them again.
            max_calls: that are made of a turn; others get a text that says so.
            timeout: seconds of a call.
            reward: of (task, content of the last turn), plain or async; None: 0, and the verifiers of `--reward`
                decide.

        Raises:
            TypeError: a function without the hints that its schema needs, or that yields.
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
        messages: list[Message] = [
            {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": result}
            for call, result in zip(turn.calls, results, strict=True)
        ]
        if turn.errors:
            wrong = "\n".join(f"Error: a tool call could not be read: {error}" for error in turn.errors)
            last = messages[-1] if messages else {"role": "user"}  # templates need the id of a call, and its name
            messages.append({**last, "content": wrong})
        return Observation(messages)

    async def _result(self, index: int, call: ToolCall) -> str:
        if index >= self._max_calls:
            return f"Error: at most {self._max_calls} calls are made of a turn"
        function = self._functions.get(call.name)
        if function is None:
            return f"Error: there is no tool {call.name[:100]!r}; there are: {', '.join(self._functions)}"
        if problem := self._problem(call):
            return f"Error: {problem}"
        try:
            result = await asyncio.wait_for(called(function, **call.arguments), self._timeout)
            return _text_of(result)[:MAX_RESULT_LENGTH]
        except TimeoutError:
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


def _text_of(result: Any) -> str:
    """A result as the policy reads it. TypeError for one that is no JSON."""
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=_plain)


def _plain(value: Any) -> Any:
    """A number of numpy or torch in a result, as JSON has it."""
    if number_of(value) is None:
        raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")
    return value.item() if hasattr(value, "item") else number_of(value)
