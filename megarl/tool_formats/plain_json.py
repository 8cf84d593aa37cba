"""Calls as the whole turn: a JSON object with name and arguments, or a list of them, perhaps in a code fence.

Other JSON is content, such as an answer `[1, 2]`.
"""

import re

from megarl.tool_formats.calls import MAX_CALLS, WrittenCall, attempt, call_of, read_json
from megarl.tool_formats.reader import CONTENT, Begins, Calls, Grammar, Said, Until

_FENCE = re.compile(r"\A```(?:json)?[ \t]*\n(.*)\n[ \t]*```\Z", re.DOTALL)
_LIKE_CALL = re.compile(r'\A\s*(?:\[\s*)?\{\s*"(?:name|arguments)"\s*:')


def plain_json(tools) -> Grammar:
    """The grammar of `--tool-call-parser json`."""
    if (yield Begins(("{", "[", "```"))) is None:
        yield Until((), CONTENT)
        return
    written, _ = yield Until(())
    found = _calls(written.strip())
    yield Calls(written, found) if found else Said(CONTENT, written)


def _calls(whole: str) -> list[WrittenCall | str]:
    """The calls of a text; empty: it is content."""
    fenced = _FENCE.match(whole)
    inner = fenced[1].strip() if fenced else whole
    if inner[:1] not in ("{", "["):
        return []
    try:
        value = read_json(inner)
    except ValueError as error:
        return [] if _LIKE_CALL.match(inner) is None else [str(error)]
    values = value if isinstance(value, list) else [value]
    if not any(isinstance(each, dict) and "arguments" in each for each in values):
        return []
    return [attempt(call_of, each) for each in values[: MAX_CALLS + 1]]
