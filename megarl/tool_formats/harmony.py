"""Harmony, of gpt-oss: a turn is several messages, each with a channel and perhaps a recipient.

    <|channel|>analysis<|message|>…<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f json<|message|>{…}<|call|>

Analysis is thoughts, a message to a function is a call, all else is content. The prompt has opened the first message.
"""

import re
from collections.abc import Generator
from typing import Any

from megarl.tool_formats.calls import attempt, read_arguments
from megarl.tool_formats.reader import CONTENT, REASONING, Begins, Calls, Grammar, Said, ThoughtMarks, Until

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
THOUGHTS = ThoughtMarks("<|channel|>analysis<|message|>", "<|end|>", "<|start|>assistant<|channel|>final<|message|>")
MARKS = (START, CHANNEL, MESSAGE, "<|constrain|>", *ENDS)
_RECIPIENT = re.compile(r"(?:\s|<\|start\|>)to=([^\s<]+)")
_ANALYSIS = re.compile(re.escape(CHANNEL) + r"\s*analysis(?![^\s<])")


def harmony(tools) -> Grammar:
    """The grammar of `--tool-call-parser gpt-oss`."""
    said: set[str] = set()
    mark = START if (yield Begins(("to=",))) else None
    while True:
        if mark != START:
            _, mark = yield Until((START, CHANNEL, MESSAGE), CONTENT)
            if mark is None:
                return
        header, begin = "", mark
        if mark != MESSAGE:
            header, begin = yield Until((MESSAGE, *ENDS))
        # A message that has no body is nothing.
        mark = (yield from _message(mark + header, said)) if begin == MESSAGE else begin
        if mark is None:
            return


def _message(header: str, said: set[str]) -> Generator[Any, Any, str | None]:
    """Reads a message's body. Returns the mark that ends it; None at the end of the text. `said`: kinds before it."""
    recipient = _RECIPIENT.search(header)
    if recipient is not None:
        written, mark = yield Until((START, *ENDS))
        name = recipient[1].removeprefix("functions.")
        yield Calls(header + MESSAGE + written, [attempt(read_arguments, name, written)])
        return mark
    kind = REASONING if _ANALYSIS.search(header) else CONTENT
    if kind in said:
        yield Said(kind, "\n")
    said.add(kind)
    _, mark = yield Until((START, *ENDS), kind)
    return mark
