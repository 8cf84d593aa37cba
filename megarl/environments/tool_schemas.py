"""JSON schemas of tools from Python functions: their type hints, defaults and Google-style docstrings."""

import inspect
import re
import types
import typing
from collections.abc import Callable
from typing import Any, Literal, Union

from megarl.tool_formats.typed_arguments import KINDS

_SIMPLE = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object",
           type(None): "null"}  # fmt: skip
_SECTION = re.compile(r"^(Args|Arguments|Returns|Raises|Yields|Example|Examples|Note|Notes):\s*$")


def schema_of(function: Callable) -> dict[str, Any]:
    """The schema of a tool, as chat templates render it: `{"type": "function", "function": {…}}`.

    Raises:
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
        others = [arg for arg in args if arg is not type(None)]
        found = (
            type_schema(others[0], where) if len(others) == 1 else {"anyOf": [type_schema(a, where) for a in others]}
        )
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
    """(text before the first section, descriptions of the arguments) of a docstring."""
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
