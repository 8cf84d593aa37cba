"""Hermes, Qwen 2.5 and Qwen 3: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`; the last one needs no end."""

from megarl.tool_formats.calls import attempt, read_call
from megarl.tool_formats.reader import CONTENT, Calls, Grammar, Until

BEGIN, END = "<tool_call>", "</tool_call>"
MARKS = (BEGIN, END)


def hermes(tools) -> Grammar:
    """The grammar of `--tool-call-parser hermes`."""
    while True:
        _, mark = yield Until((BEGIN,), CONTENT)
        if mark is None:
            return
        written, end = yield Until((END,))
        yield Calls(f"{BEGIN}{written}{end or ''}", [attempt(read_call, written)])
        if end is None:
            return
