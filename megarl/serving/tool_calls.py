"""Finds tool calls in generated text: `<tool_call>{"name": …, "arguments": {…}}</tool_call>` of Hermes and Qwen."""

import json
import secrets
from typing import Any

from megarl.environments.turn_parsing import BEGIN, END, is_unicode, read_call
from megarl.serving.stop_strings import StopStrings


class ToolCallParser:
    """Separates streamed text into content and tool calls; what is not a valid call stays content.

    White space next to a call is dropped. `count` is the number of calls so far.
    """

    def __init__(self):
        self.count = 0
        self._begin = StopStrings([BEGIN])
        self._end: StopStrings | None = None  # inside a call
        self._call = ""
        self._space = ""  # white space that is content if content follows
        self._follows_call = False

    def feed(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """(content, complete calls) that the text adds."""
        content, calls = "", []
        while text:
            text, found, call = self._inside(text) if self._end is not None else self._outside(text)
            content += found
            calls += call
        return content, calls

    def finish(self) -> tuple[str, list[dict[str, Any]]]:
        """(content, calls) that were held back, at the end of the text; a last call needs no end mark."""
        if self._end is None:
            return self._content(self._begin.finish()) + self._space, []
        self._call += self._end.finish()
        call = self._parse(self._call)
        return ("", [call]) if call else (self._content(BEGIN + self._call) + self._space, [])

    def _outside(self, text: str) -> tuple[str, str, list[dict[str, Any]]]:
        """(text left to read, content, no call)."""
        before, rest = _split(self._begin, text)
        if rest is None:
            return "", self._content(before), []
        self._begin, self._end, self._call = StopStrings([BEGIN]), StopStrings([END]), ""
        return rest, self._content(before), []

    def _inside(self, text: str) -> tuple[str, str, list[dict[str, Any]]]:
        """(text left to read, content, calls)."""
        assert self._end is not None  # set where the call begins
        before, rest = _split(self._end, text)
        self._call += before
        if rest is None:
            return "", "", []
        self._end = None
        call = self._parse(self._call)
        if call is None:
            return rest, self._content(BEGIN + self._call + END), []
        self._space, self._follows_call = "", True
        return rest, "", [call]

    def _content(self, text: str) -> str:
        """Content without the white space at its end, and at its start after a call."""
        whole = self._space + text
        if self._follows_call:
            whole = whole.lstrip()
            self._follows_call = not whole
        shown = whole.rstrip()
        self._space = whole[len(shown) :]
        return shown

    def _parse(self, text: str) -> dict[str, Any] | None:
        try:
            name, arguments = read_call(text)
            written = json.dumps(arguments, ensure_ascii=False)
            if not is_unicode(written):
                written = json.dumps(arguments)
        except (ValueError, RecursionError):
            return None
        self.count += 1
        function = {"name": name, "arguments": written}
        return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


def _split(marks: StopStrings, text: str) -> tuple[str, str | None]:
    """(what is certainly before the mark, what follows it, or None if it has not come)."""
    before = marks.feed(text)
    if marks.matched is None:
        return before, None
    return before, text[marks.consumed :]
