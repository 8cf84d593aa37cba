"""Tool calls as JSON values, and what a call may be in every format. The text is hostile: only ValueError is raised.

A call has a name, and arguments of valid Unicode, numbers that JSON can write and at most `MAX_DEPTH` levels. What
arguments are that are written as plain text, the schema of the tool says: a string stays as it is written, other values
are JSON, and what is no JSON stays text, which the tool refuses.
"""

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from megarl.plain_values import is_unicode, whole_unicode

MAX_CALLS = 128  # that are read of a turn; more are an error
MAX_DEPTH = 64  # levels of arguments: what passes them on to an environment may be recursive
TOO_MANY = f"more than {MAX_CALLS} calls in a turn"
_MAX_NAME_LENGTH = 256
_SPACE = re.compile(r"\s*")


class WrittenCall(NamedTuple):
    """A call as the policy wrote it; `id`: the one that it gave the call, in formats that have one."""

    name: str
    arguments: dict[str, Any]
    id: str | None = None


def read_json(text: str) -> Any:
    """The JSON value of a text. ValueError: why it has none, in a line for the policy."""
    return _decoded(lambda: json.loads(text, parse_constant=_no_constant))


def read_json_values(text: str, separator: str, most: int) -> tuple[list[Any], str | None]:
    """At most that many JSON values, with white space or separators between them, and why what follows is none."""
    values, at = [], 0
    while (at := _after_space(text, at)) < len(text) and len(values) < most:
        try:
            value, at = _decoded(functools.partial(_DECODER.raw_decode, text, at))
        except ValueError as error:
            return values, str(error)
        values.append(value)
        while text.startswith(separator, at := _after_space(text, at)):
            at += len(separator)
    return values, None


def call_of(value: Any, arguments: tuple[str, ...] = ("arguments",)) -> WrittenCall:
    """A call written as a JSON object with a name and `arguments`, in the first of these fields that it has.

    ValueError: why it is none, in a line for the policy.
    """
    if not isinstance(value, dict):
        raise ValueError(f"a call must be a JSON object with name and {arguments[0]}")
    field = next((each for each in arguments if each in value), arguments[0])
    written = value.get("id")
    return checked(WrittenCall(value.get("name"), value.get(field, {}), written if isinstance(written, str) else None))


def read_arguments(name: str, text: str, written_id: str | None = None) -> WrittenCall:
    """A call whose arguments are the JSON object of a text; an empty text: none. ValueError as of `call_of`."""
    return checked(WrittenCall(name, read_json(text) if text.strip() else {}, written_id))


def checked(call: WrittenCall) -> WrittenCall:
    """The call as a program can use it. ValueError: why it is none, in a line for the policy."""
    name, arguments = call.name, call.arguments
    if not isinstance(name, str) or not is_unicode(name):
        raise ValueError("the call has no name")
    if not isinstance(arguments, dict):
        raise ValueError(f"the arguments of {name[:80]!r} must be a JSON object")
    if not name.strip() or len(name) > _MAX_NAME_LENGTH:
        raise ValueError(f"a name has 1 to {_MAX_NAME_LENGTH} characters")
    if _is_deeper(arguments, MAX_DEPTH):
        raise ValueError(f"the arguments of {name[:80]!r} are nested more than {MAX_DEPTH} levels deep")
    try:
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise ValueError(f"the arguments of {name[:80]!r} hold a number that is too large") from None
    return call if is_unicode(written) else call._replace(arguments=json.loads(whole_unicode(written)))


def attempt(read: Callable[..., WrittenCall], *written: Any) -> WrittenCall | str:
    """The call that `read` finds in what was written, or why it is none."""
    try:
        return read(*written)
    except ValueError as error:
        return str(error)


def _is_deeper(value: Any, levels: int) -> bool:
    level = [value]
    for _ in range(levels + 1):
        level = [inner for each in level for inner in inside(each)]
    return bool(level)


def inside(value: Any) -> list[Any]:
    """The values in a list or object."""
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []


def _after_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at


def _decoded(decode: Callable[[], Any]) -> Any:
    try:
        return decode()
    except json.JSONDecodeError as error:
        raise ValueError(f"malformed JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise ValueError("malformed JSON: nested too deeply") from None
    except ValueError:  # of a number with thousands of digits
        raise ValueError("malformed JSON: a number has too many digits") from None


def _no_constant(name: str):
    raise json.JSONDecodeError(f"{name} is not allowed", name, 0)


_DECODER = json.JSONDecoder(parse_constant=_no_constant)


# -- arguments that are written as plain text --------------------------------------------------------------------------


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
