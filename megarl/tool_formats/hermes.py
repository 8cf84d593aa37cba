"""Hermes, Qwen 2.5 and Qwen 3: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`; the last one needs no end."""

from megarl.tool_formats.calls import call_of, read_json
from megarl.tool_formats.reader import Grammar
from megarl.tool_formats.sections import enclosed

BEGIN, END = "<tool_call>", "</tool_call>"
MARKS = (BEGIN, END)


def hermes(tools) -> Grammar:
    """The grammar of `--tool-call-parser hermes`."""
    yield from enclosed({BEGIN: END}, lambda text: call_of(read_json(text.removeprefix(BEGIN))))
