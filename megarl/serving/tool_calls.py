"""Separates an answer that is generated into thoughts, content and tool calls, in the format of the policy."""

import json
import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple

from megarl.data.detokenizer import Vocabulary
from megarl.data.messages import tool_call
from megarl.tool_formats.calls import WrittenCall
from megarl.tool_formats.reader import CONTENT, Calls, Part
from megarl.tool_formats.tool_format import ToolFormat
from megarl.tool_formats.typed_arguments import Tools

_LAST_TOKENS = 16  # of a prompt: enough for a mark, one character each


class AnswerDelta(NamedTuple):
    """What a text adds to an answer; `calls`: complete ones, as OpenAI's API has them."""

    content: str
    reasoning: str
    calls: list[dict[str, Any]]


class ToolCallParser:
    """Separates streamed text; what is not a valid call stays content.

    White space next to a call, and around thoughts, is dropped. `count` is the number of calls so far.
    """

    def __init__(self, form: ToolFormat, tools: Tools = (), opened: bool = False, may_call: bool = True):
        """
        Args:
            tools: of the request.
            opened: whether the prompt has begun the answer's thoughts.
            may_call: whether calls are read; otherwise they are content.
        """
        self.count = 0
        self._form, self._may_call = form, may_call
        self._reader = form.answer_reader(tools, opened)
        self._content, self._reasoning = _TrimmedText(), _TrimmedText()
        self._reasoning.drop_space()
        self._ids: set[str] = set()

    def feed(self, text: str) -> AnswerDelta:
        """What the text adds."""
        return self._delta(self._reader.feed(text))

    def finish(self) -> AnswerDelta:
        """What was held back, at the end of the text; a last call needs no end mark in most formats."""
        found = self._delta(self._reader.finish())
        return found._replace(content=found.content + self._content.held)

    def _delta(self, parts: Sequence[Part]) -> AnswerDelta:
        content, reasoning = "", ""
        calls: list[dict[str, Any]] = []
        for part in parts:
            if isinstance(part, Calls):
                found = [call for call in part.found if isinstance(call, WrittenCall)] if self._may_call else []
                calls += map(self._call, found)
                if found:
                    self._content.drop_space()
                else:
                    content += self._content.add(part.written)
            elif part.kind == CONTENT:
                content += self._content.add(part.text)
            else:
                reasoning += self._reasoning.add(part.text)
                self._content.drop_space()
        return AnswerDelta(content, reasoning, calls)

    def _call(self, call: WrittenCall) -> dict[str, Any]:
        self.count += 1
        own = call.id if self._form.accepts_id(call.id) and call.id not in self._ids else None
        length = self._form.id_length
        made = f"call_{secrets.token_hex(12)}" if length is None else secrets.token_hex(length)[:length]
        self._ids.add(own or made)
        return tool_call(own or made, call.name, json.dumps(call.arguments, ensure_ascii=False))


class _TrimmedText:
    """A text that grows; white space at its end is held back until more follows."""

    def __init__(self):
        self.held = ""
        self._drops = False  # white space until something else comes

    def add(self, text: str) -> str:
        """The text that is certain now."""
        whole = self.held + text
        if self._drops:
            whole = whole.lstrip()
            self._drops = not whole
        shown = whole.rstrip()
        self.held = whole[len(shown) :]
        return shown

    def drop_space(self):
        self.held, self._drops = "", True


def has_opened_thoughts(form: ToolFormat, vocabulary: Vocabulary, prompt: Sequence[int]) -> bool:
    """Whether a prompt ends with the mark that begins thoughts."""
    if form.thoughts is None:
        return False
    last = "".join(vocabulary.token(token)[0] for token in prompt[-_LAST_TOKENS:])
    return last.rstrip().endswith(form.thoughts[0])
