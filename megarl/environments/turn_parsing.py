"""Reads a turn's text: reasoning, content and tool calls. The text is hostile: nothing in it raises an exception.

A parser maps the text without its reasoning to (content, calls as (name, arguments), why what looks like a call is
none). The server's parser for streams (`megarl/serving/tool_calls.py`) reads a call with the same function.
"""

import json
import re
from collections.abc import Callable
from typing import Any

from megarl import plugins, process_state
from megarl.environments.protocol import ToolCall, Turn

BEGIN, END = "<tool_call>", "</tool_call>"
_THOUGHTS, _THOUGHTS_END = "<think>", "</think>"
_FENCE = re.compile(r"\A```(?:json)?[ \t]*\n(.*)\n[ \t]*```\Z", re.DOTALL)
_LIKE_CALL = re.compile(r'\A\s*(?:\[\s*)?\{\s*"(?:name|arguments)"\s*:')
_HALF = re.compile("[\ud800-\udfff]")
MAX_CALLS = 128  # that are read of a turn; more are an error
MAX_DEPTH = 64  # levels of arguments: what passes them on to an environment may be recursive
_MAX_NAME_LENGTH = 256

Call = tuple[str, dict[str, Any]]
ParsedText = tuple[str, list[Call], list[str]]
Parser = Callable[[str], ParsedText]


def read_call(text: str) -> Call:
    """(name, arguments) of a call written as a JSON object.

    Raises:
        ValueError: why it is none, in a line for the policy.
    """
    return call_of(_loaded(text))


def call_of(value: Any) -> Call:
    """(name, arguments) of a call as a JSON value. ValueError as of `read_call`."""
    if not isinstance(value, dict):
        raise ValueError("a call must be a JSON object with name and arguments")
    name, arguments = value.get("name"), value.get("arguments", {})
    if not isinstance(name, str) or not is_unicode(name):
        raise ValueError("the call has no name")
    if not isinstance(arguments, dict):
        raise ValueError(f"the arguments of {name[:80]!r} must be a JSON object")
    return name, arguments


def parse_hermes(text: str) -> ParsedText:
    """Calls as `<tool_call>{"name": …, "arguments": {…}}</tool_call>` (Hermes, Qwen). The last one needs no end."""
    content: list[str] = []
    calls: list[Call] = []
    errors: list[str] = []
    start = 0
    while (begin := text.find(BEGIN, start)) >= 0 and len(calls) + len(errors) < MAX_CALLS:
        content.append(text[start:begin])
        begin += len(BEGIN)
        end = text.find(END, begin)
        end, start = (len(text), len(text)) if end < 0 else (end, end + len(END))
        _collect(read_call, text[begin:end], calls, errors)
    if begin >= 0:
        errors.append(_TOO_MANY)
    content.append(text[start:])
    return "\n".join(filter(None, (part.strip() for part in content))), calls, errors


def parse_json(text: str) -> ParsedText:
    """Calls as the whole text: a JSON object with name and arguments, or a list of them, perhaps in a code fence.

    Other JSON is content, such as an answer `[1, 2]`.
    """
    whole = text.strip()
    fenced = _FENCE.match(whole)
    inner = fenced[1].strip() if fenced else whole
    if inner[:1] not in ("{", "["):
        return whole, [], []
    try:
        value = _loaded(inner)
    except ValueError as error:
        return (whole, [], []) if _LIKE_CALL.match(inner) is None else ("", [], [str(error)])
    values = value if isinstance(value, list) else [value]
    if not any(isinstance(each, dict) and "arguments" in each for each in values):
        return whole, [], []
    calls: list[Call] = []
    errors: list[str] = []
    for each in values[:MAX_CALLS]:
        _collect(call_of, each, calls, errors)
    return "", calls, errors + [_TOO_MANY] * (len(values) > MAX_CALLS)


_TOO_MANY = f"more than {MAX_CALLS} calls in a turn"
TOOL_CALL_PARSERS: dict[str, Parser] = {"hermes": parse_hermes, "json": parse_json}


def load_parser(name: str) -> Parser:
    """The parser of `--tool-call-parser`: a built-in one or package.module:function. UsageError if it is neither."""
    if name in TOOL_CALL_PARSERS:
        return TOOL_CALL_PARSERS[name]
    caller = f"--tool-call-parser {name}"
    with process_state.kept(caller):
        return process_state.keeping(caller, plugins.load("--tool-call-parser", name, TOOL_CALL_PARSERS))


def parse_turn(text: str, number: int, parser: Parser) -> Turn:
    """What the policy wrote in turn `number`, with calls named `call_{turn}_{index}`.

    Its thoughts end with `</think>`, and may begin with `<think>`, unless the template wrote that; a turn that begins
    so and does not end its thoughts is nothing else, so calls in thoughts are not made. Names and arguments hold valid
    Unicode, numbers that JSON can write, and at most `MAX_DEPTH` levels; other calls are errors.
    """
    text = _HALF.sub("\ufffd", text)
    reasoning, rest = _reasoning(text)
    try:
        content, found, errors = parser(rest)
        calls, problems = _sound(found)
        named = tuple(ToolCall(f"call_{number}_{index}", *call) for index, call in enumerate(calls))
        errors = (*map(str, errors), *problems)
        return Turn(number, text, content=str(content), reasoning=reasoning, calls=named, errors=errors)
    except Exception as error:  # of a plug-in that did not expect this text
        problem = f"{type(error).__name__}: {error}"[:200]
        return Turn(number, text, content=rest, reasoning=reasoning, errors=(problem,))


def is_unicode(text: str) -> bool:
    """Whether a text has no half of a surrogate pair."""
    return text.isascii() or _HALF.search(text) is None


def _reasoning(text: str) -> tuple[str, str]:
    """Thoughts, and the text after them."""
    before, marker, rest = text.partition(_THOUGHTS_END)
    opened = before.lstrip()
    if not marker and not opened.startswith(_THOUGHTS):
        return "", text
    return opened.removeprefix(_THOUGHTS).strip(), rest


def _sound(found: list[Call]) -> tuple[list[Call], list[str]]:
    """The valid calls of a turn, as a program can use them, and why the others are not valid."""
    calls: list[Call] = []
    errors: list[str] = []
    for call in found:
        _collect(_sound_call, call, calls, errors)
    return calls, errors


def _sound_call(call: Call) -> Call:
    name, arguments = call
    call_of({"name": name, "arguments": arguments})
    if not name.strip() or len(name) > _MAX_NAME_LENGTH:
        raise ValueError(f"a name has 1 to {_MAX_NAME_LENGTH} characters")
    if _is_deeper(arguments, MAX_DEPTH):
        raise ValueError(f"the arguments of {name[:80]!r} are nested more than {MAX_DEPTH} levels deep")
    try:
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise ValueError(f"the arguments of {name[:80]!r} hold a number that is too large") from None
    return name, arguments if is_unicode(written) else json.loads(_HALF.sub("\ufffd", written))


def _is_deeper(value: Any, levels: int) -> bool:
    """Whether a JSON value has more levels of lists and objects."""
    level = [value]
    for _ in range(levels + 1):
        level = [inner for each in level for inner in _inside(each)]
    return bool(level)


def _inside(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []


def _collect(read: Callable[[Any], Call], written: Any, calls: list[Call], errors: list[str]):
    try:
        calls.append(read(written))
    except ValueError as error:
        errors.append(str(error))


def _loaded(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise ValueError(f"malformed JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise ValueError("malformed JSON: nested too deeply") from None
    except ValueError:  # of a number with thousands of digits
        raise ValueError("malformed JSON: a number has too many digits") from None


def _no_constant(name: str):
    raise json.JSONDecodeError(f"{name} is not allowed", name, 0)
