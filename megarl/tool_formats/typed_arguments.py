"""Arguments that are written as plain text: what they are, by the schema of the tool.

A string stays as it is written; other values are JSON. What is no JSON stays text, which the tool refuses.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from megarl.tool_formats.written_calls import read_json

Tools = Sequence[Mapping[str, Any]]
_PYTHON = {"True": True, "False": False, "None": None}  # which templates write that do not make JSON of values
KINDS: dict[str, tuple[type, ...]] = {  # of JSON schemas
    "string": (str,),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


class TextCursor:
    """A place in a text, which moves from mark to mark."""

    def __init__(self, text: str):
        self._text, self._at = text, 0

    def until(self, mark: str) -> str | None:
        """The text up to the next such mark, after which the cursor then is; None: there is none, nothing moves."""
        end = self._text.find(mark, self._at)
        if end < 0:
            return None
        found, self._at = self._text[self._at : end], end + len(mark)
        return found

    def rest(self) -> str:
        return self._text[self._at :]


def parameters_of(tools: Tools, name: str) -> Mapping[str, Any]:
    """The schemas of a tool's parameters; {} if there are none, whatever the tools look like."""
    for tool in tools:
        function = _object(_object(tool).get("function", tool))
        if function.get("name") == name:
            return _object(_object(function.get("parameters")).get("properties"))
    return {}


def argument(text: str, schema: Any) -> Any:
    """The value of an argument that was written as `text`. `schema`: of the parameter; None if it is unknown."""
    types = _types(schema)
    if types == {"string"}:
        return text
    try:
        value = _PYTHON[text.strip()] if text.strip() in _PYTHON else read_json(text)
    except ValueError:
        return text
    if types and "string" not in types:
        return value
    fits = not types or type(value) in {kind for each in types for kind in KINDS.get(each, ())}
    return value if fits and not isinstance(value, str) else text


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _types(schema: Any, levels: int = 8) -> set[str]:
    """Types that a value may have; empty: any."""
    schema = _object(schema)
    listed = schema.get("type")
    found = {each for each in (listed if isinstance(listed, list) else [listed]) if isinstance(each, str)}
    for name in ("anyOf", "oneOf"):
        inner = schema.get(name)
        for each in inner if isinstance(inner, list) and levels else []:
            found |= _types(each, levels - 1)
    return found | {"null"} if found and schema.get("nullable") else found
