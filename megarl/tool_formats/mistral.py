"""Mistral: `[TOOL_CALLS][{"name": …, "arguments": {…}, "id": …}, …]`, or since version 11 of its tokenizer
`[TOOL_CALLS]name[ARGS]{…}` for each call, in version 11 with `[CALL_ID]id` after the name.
"""

from megarl.tool_formats.calls import MAX_CALLS, WrittenCall, attempt, call_of, read_arguments, read_json
from megarl.tool_formats.reader import CONTENT, Calls, Grammar, Until

BEGIN, ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
MARKS = (BEGIN, ID, ARGUMENTS)
THOUGHTS = "[THINK]", "[/THINK]"


def mistral(tools) -> Grammar:
    """The grammar of `--tool-call-parser mistral`."""
    _, mark = yield Until((BEGIN,), CONTENT)
    while mark is not None:
        written, mark = yield Until((BEGIN,))
        yield Calls(BEGIN + written, _calls(written))


def _calls(written: str) -> list[WrittenCall | str]:
    head, mark, arguments = written.partition(ARGUMENTS)
    if mark:
        name, _, written_id = head.partition(ID)
        return [attempt(read_arguments, name.strip(), arguments, written_id.strip())]
    try:
        value = read_json(written)
    except ValueError as error:
        return [str(error)]
    values = value if isinstance(value, list) and value else [value]
    return [attempt(call_of, each) for each in values[: MAX_CALLS + 1]]
