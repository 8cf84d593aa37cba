"""Reads a turn's text: reasoning, content and tool calls. The text is hostile: nothing in it raises an exception.

A parser maps the text without its reasoning to (content, calls as (name, arguments), why what looks like a call is
none). The server's parser for streams (`megarl/serving/tool_calls.py`) reads calls with the same function.
"""

import json
import re
from collections.abc import Callable
from typing import Any

from megarl import plugins
from megarl.environments.protocol import ToolCall, Turn

BEGIN, END = "<tool_call>", "</tool_call>"
_THOUGHTS_END = "</think>"
_FENCE = re.compile(r"\A```(?:json)?[ \t]*\n(.*)\n```\Z", re.DOTALL)
MOST_CALLS = 128  # that are read of a turn; more are an error

Call = tuple[str, dict[str, Any]]
ParsedText = tuple[str, list[Call], list[str]]
Parser = Callable[[str], ParsedText]


def read_call(text: str) -> Call:
    """(name, arguments) of a call written as a JSON object.

    Raises:
        ValueError: why it is none, in a line for the policy.
    """
    try:
        call = json.loads(text, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise ValueError(f"malformed JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise ValueError("malformed JSON: nested too deeply") from None
    return checked_call(call)


def checked_call(call: Any) -> Call:
    """(name, arguments) of a call as a JSON value. ValueError as of `read_call`."""
    if not isinstance(call, dict):
        raise ValueError("a call is a JSON object with name and arguments")
    name, arguments = call.get("name"), call.get("arguments", {})
    if not isinstance(name, str) or not name or not is_unicode(name):
        raise ValueError("the call has no name")
    if not isinstance(arguments, dict):
        raise ValueError(f"the arguments of {name[:80]} are no JSON object")
    return name, arguments


def parse_hermes(text: str) -> ParsedText:
    """Calls as `<tool_call>{"name": …, "arguments": {…}}</tool_call>` (Hermes, Qwen). The last one needs no end."""
    content, calls, errors = [], [], []
    head, *pieces = text.split(BEGIN)
    content.append(head)
    for number, piece in enumerate(pieces):
        if number == MOST_CALLS:
            errors.append(f"more than {MOST_CALLS} calls")
            break
        inside, _, after = piece.partition(END)
        try:
            calls.append(read_call(inside))
        except ValueError as error:
            errors.append(str(error))
        content.append(after)
    return "\n".join(filter(None, (part.strip() for part in content))), calls, errors


def parse_json(text: str) -> ParsedText:
    """Calls as the whole text: a JSON object with name and arguments, or a list of them, perhaps in a code fence."""
    whole = text.strip()
    fenced = _FENCE.match(whole)
    inner = fenced[1].strip() if fenced else whole
    if inner[:1] not in ("{", "["):
        return text.strip(), [], []
    try:
        value = json.loads(inner, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        return text.strip(), [], [f"malformed JSON: {error.msg} at character {error.pos}"]
    except (ValueError, RecursionError):
        return text.strip(), [], ["malformed JSON"]
    if not (is_call(value) or (isinstance(value, list) and value and all(map(is_call, value)))):
        return text.strip(), [], []  # an answer in JSON
    calls, errors = [], []
    for each in (value if isinstance(value, list) else [value])[:MOST_CALLS]:
        try:
            calls.append(checked_call(each))
        except ValueError as error:
            errors.append(str(error))
    return "", calls, errors


def is_call(value: Any) -> bool:
    """Whether a JSON value is meant as a call."""
    return isinstance(value, dict) and "name" in value and "arguments" in value


TOOL_CALL_PARSERS: dict[str, Parser] = {"hermes": parse_hermes, "json": parse_json}


def load_parser(name: str) -> Parser:
    """The parser of `--tool-call-parser`: a built-in one or package.module:function. UsageError if it is neither."""
    return plugins.load("--tool-call-parser", name, TOOL_CALL_PARSERS)


def parse_turn(text: str, number: int, parser: Parser) -> Turn:
    """What the policy wrote in turn `number`, with calls named `call_{turn}_{index}`; half surrogates become U+FFFD."""
    if not is_unicode(text):
        text = text.encode("utf-8", "replace").decode("utf-8")
    before, marker, rest = text.partition(_THOUGHTS_END)
    reasoning = before.strip().removeprefix("<think>").strip() if marker else ""
    try:
        content, calls, errors = parser(rest if marker else text)
    except Exception as error:  # of a plug-in that did not expect this text
        content, calls, errors = text, [], [f"{type(error).__name__}: {error}"[:200]]
    named = tuple(ToolCall(f"call_{number}_{index}", *call) for index, call in enumerate(calls))
    return Turn(number, text, content, reasoning, named, tuple(errors))


def is_unicode(text: str) -> bool:
    """Whether a text has no half surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _no_constant(name: str):
    raise json.JSONDecodeError(f"{name} is no JSON", name, 0)
