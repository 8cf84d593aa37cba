"""Formats whose calls are JSON without an end of their own: plain JSON, Llama, Mistral.

Each is a grammar of `--tool-call-parser`, and its marks.
"""

import re

from megarl.tool_formats.reader import CONTENT, Begins, Calls, Grammar, Said, Until
from megarl.tool_formats.written_calls import (
    MAX_CALLS,
    WrittenCall,
    attempt,
    call_of,
    read_arguments,
    read_json,
    read_json_values,
)

_FENCE = re.compile(r"\A```(?:json)?[ \t]*\n(.*)\n[ \t]*```\Z", re.DOTALL)
_LIKE_PLAIN_CALL = re.compile(r'\A\s*(?:\[\s*)?\{\s*"(?:name|arguments)"\s*:')
LLAMA_TAG = "<|python_tag|>"
_LLAMA_FIELDS = ("parameters", "arguments")
_LIKE_LLAMA_CALL = re.compile(r'\A\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"(?:name|parameters)"\s*:')
MISTRAL_BEGIN, _MISTRAL_ID, _MISTRAL_ARGUMENTS = MISTRAL_MARKS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
MISTRAL_THOUGHTS = "[THINK]", "[/THINK]"


def plain_json(tools) -> Grammar:
    """The whole turn is a JSON object with name and arguments, or a list of them, perhaps in a code fence.

    Other JSON is content.
    """
    if (yield Begins(("{", "[", "```"))) is None:
        yield Until((), CONTENT)
        return
    written, _ = yield Until(())
    found = _plain_calls(written.strip())
    yield Calls(written, found) if found else Said(CONTENT, written)


def _plain_calls(whole: str) -> list[WrittenCall | str]:
    fenced = _FENCE.match(whole)
    inner = fenced[1].strip() if fenced else whole
    if inner[:1] not in ("{", "["):
        return []
    try:
        value = read_json(inner)
    except ValueError as error:
        return [] if _LIKE_PLAIN_CALL.match(inner) is None else [str(error)]
    values = value if isinstance(value, list) else [value]
    if not any(isinstance(each, dict) and "arguments" in each for each in values):
        return []
    return [attempt(call_of, each) for each in values[: MAX_CALLS + 1]]


def llama(tools) -> Grammar:
    """Llama 3: the whole turn is `{"name": …, "parameters": {…}}`, or several with `;` between them, perhaps after
    `<|python_tag|>`. JSON without that mark which is no call is content.
    """
    begins = yield Begins(("{", LLAMA_TAG))
    if begins == "{":
        written, mark = yield Until((LLAMA_TAG,))
        found = _llama_calls(written, is_marked=False)
        yield Calls(written, found) if found else Said(CONTENT, written)
    else:
        _, mark = yield Until((LLAMA_TAG,), CONTENT)
    while mark is not None:
        written, mark = yield Until((LLAMA_TAG,))
        yield Calls(LLAMA_TAG + written, _llama_calls(written, is_marked=True) or ["a call must be a JSON object"])


def _llama_calls(written: str, is_marked: bool) -> list[WrittenCall | str]:
    values, problem = read_json_values(written, ";", MAX_CALLS + 1)
    named = [value for value in values if isinstance(value, dict) and "name" in value]
    is_call = any(field in value for value in named for field in _LLAMA_FIELDS)
    if not is_marked and not is_call and not (problem and _LIKE_LLAMA_CALL.match(written)):
        return []
    return [attempt(call_of, value, _LLAMA_FIELDS) for value in values] + ([problem] if problem else [])


def mistral(tools) -> Grammar:
    """Mistral: `[TOOL_CALLS][{"name": …, "arguments": {…}, "id": …}, …]`, or since version 11 of its tokenizer
    `[TOOL_CALLS]name[ARGS]{…}` for each call, in version 11 with `[CALL_ID]id` after the name.
    """
    _, mark = yield Until((MISTRAL_BEGIN,), CONTENT)
    while mark is not None:
        written, mark = yield Until((MISTRAL_BEGIN,))
        yield Calls(MISTRAL_BEGIN + written, _mistral_calls(written))


def _mistral_calls(written: str) -> list[WrittenCall | str]:
    head, mark, arguments = written.partition(_MISTRAL_ARGUMENTS)
    if mark:
        name, _, written_id = head.partition(_MISTRAL_ID)
        return [attempt(read_arguments, name.strip(), arguments, written_id.strip())]
    try:
        value = read_json(written)
    except ValueError as error:
        return [str(error)]
    values = value if isinstance(value, list) and value else [value]
    return [attempt(call_of, each) for each in values[: MAX_CALLS + 1]]
