"""Llama 3: the whole turn is `{"name": …, "parameters": {…}}`, or several with `;` between them, perhaps after
`<|python_tag|>`. JSON without that mark which is no call is content.
"""

import re
from typing import Any

from megarl.tool_formats.calls import MAX_CALLS, WrittenCall, attempt, call_of, read_json_values
from megarl.tool_formats.reader import CONTENT, Begins, Calls, Grammar, Said, Until

TAG = "<|python_tag|>"
MARKS = (TAG,)
_FIELDS = ("parameters", "arguments")
_LIKE_CALL = re.compile(r'\A\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"(?:name|parameters)"\s*:')


def llama(tools) -> Grammar:
    """The grammar of `--tool-call-parser llama`."""
    begins = yield Begins(("{", TAG))
    if begins == "{":
        written, mark = yield Until((TAG,))
        found = _calls(written, is_marked=False)
        yield Calls(written, found) if found else Said(CONTENT, written)
    else:
        _, mark = yield Until((TAG,), CONTENT)
    while mark is not None:
        written, mark = yield Until((TAG,))
        yield Calls(TAG + written, _calls(written, is_marked=True) or ["a call must be a JSON object"])


def _calls(written: str, is_marked: bool) -> list[WrittenCall | str]:
    """The calls of a text; empty: there is none."""
    values, problem = read_json_values(written, ";", MAX_CALLS + 1)
    if not is_marked and not any(map(_is_like_call, values)) and not (problem and _LIKE_CALL.match(written)):
        return []
    return [attempt(call_of, value, _FIELDS) for value in values] + ([problem] if problem else [])


def _is_like_call(value: Any) -> bool:
    return isinstance(value, dict) and "name" in value and any(field in value for field in _FIELDS)
