"""From generated tokens to an answer's text: characters that are certain, cut at stop strings; thoughts and tool calls.

Tokens and texts come in pieces, and what might still turn out to be a mark is held back.
"""

import json
import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from megarl.data.detokenizer import Vocabulary
from megarl.data.messages import tool_call
from megarl.serving.replica_messages import RequestUpdate
from megarl.serving.sampling import StopRules
from megarl.tool_formats.reader import CONTENT, Calls
from megarl.tool_formats.tool_format import ToolFormat
from megarl.tool_formats.written_calls import Tools, WrittenCall

_LAST_TOKENS = 16  # of a prompt: enough for a mark, one character each


@dataclass
class AnswerProgress:
    """What an update adds to an answer: characters that are certain now, and its tokens; one item for each token."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    top: Sequence[Any] | None = None
    offsets: list[int] = field(default_factory=list)  # characters of the whole text before each token
    finish: str | None = None  # "stop", "length", "abort"
    stop_reason: str | int | None = None  # the stop string, or the token of `stop_token_ids`, that ended it
    fingerprint: str | None = None  # label and policy version of the last token


class AnswerText:
    """Turns the tokens of one answer into text, and cuts it at stop strings."""

    def __init__(self, vocabulary: Vocabulary, rules: StopRules, marks: Collection[str] = ()):
        """`marks`: special tokens whose strings are part of the text."""
        strings, self._end_tokens, self._includes_stops = rules
        self._detokenizer = vocabulary.detokenizer(marks)
        self._stops = StopStrings(strings, self._includes_stops)
        self._length = 0

    def prompt(self, tokens: Sequence[int]) -> AnswerProgress:
        """Stop strings have no meaning in it."""
        progress = AnswerProgress(tokens=list(tokens))
        for token in tokens:
            progress.offsets.append(self._length)
            progress.text += self._piece(token)
        return progress

    def feed(self, update: RequestUpdate) -> AnswerProgress:
        """The progress that an update with generated tokens makes."""
        progress = AnswerProgress(finish=update.finish, fingerprint=update.fingerprint)
        for token in update.tokens:
            is_end = update.finish == "stop" and len(progress.tokens) == len(update.tokens) - 1
            progress.tokens.append(token)
            progress.offsets.append(self._length)
            if is_end and token in self._end_tokens:
                progress.stop_reason = token
            if not is_end or self._includes_stops:
                progress.text += self._stops.feed(self._piece(token))
            if self._stops.matched is not None:
                break
        if update.finish is not None and self._stops.matched is None:
            rest = self._detokenizer.finish()
            progress.text += self._stops.feed(rest) + self._stops.finish()
        if self._stops.matched is not None:
            progress.finish, progress.stop_reason = "stop", self._stops.matched
        count = len(progress.tokens)
        progress.logprobs = list(update.logprobs[:count])
        progress.top = update.top and update.top[:count]
        return progress

    def _piece(self, token: int) -> str:
        piece = self._detokenizer.feed(token)
        self._length += len(piece)
        return piece


class StopStrings:
    """Cuts a text that comes in pieces at the first stop string; of those complete at the same character, the longest.

    Text that may be the beginning of one is held back. `matched`: what was found.
    """

    def __init__(self, stops: Sequence[str], include: bool = False):
        self._stops, self._include = set(stops), include
        self._max_held = max(map(len, stops), default=1) - 1
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """The text that is certain now; nothing after a stop string."""
        if self.matched is not None:
            return ""
        pending = self._held + text
        ends = [(start + len(stop), -len(stop), stop) for stop in self._stops if (start := pending.find(stop)) >= 0]
        if ends:
            end, _, self.matched = min(ends)
            self._held = ""
            return pending[: end if self._include else end - len(self.matched)]
        held = pending[max(0, len(pending) - self._max_held) :]
        while held and not any(stop.startswith(held) for stop in self._stops):
            held = held[1:]
        self._held = held
        return pending[: len(pending) - len(held)]

    def finish(self) -> str:
        """The text held back, when none follows."""
        held, self._held = self._held, ""
        return held


# -- thoughts and tool calls -------------------------------------------------------------------------------------------


# What a text adds to an answer: content, reasoning, and complete calls as OpenAI's API has them.
AnswerDelta = tuple[str, str, list[dict[str, Any]]]


class ToolCallParser:
    """Separates streamed text; what is not a valid call stays content.

    White space next to a call, and around thoughts, is dropped. `count` is the number of calls so far.
    """

    def __init__(self, form: ToolFormat, tools: Tools = (), opened: bool = False, may_call: bool = True):
        """`opened`: the prompt has begun the answer's thoughts; `may_call`: whether calls are read, or are content."""
        self.count = 0
        self._form, self._may_call = form, may_call
        self._reader = form.answer_reader(tools, opened)
        self._content, self._reasoning = _TrimmedText(), _TrimmedText()
        self._reasoning.drop_space()
        self._ids: set[str] = set()

    def feed(self, text: str, is_last: bool = False) -> AnswerDelta:
        """What the text adds. `is_last`: with what was held back; a last call needs no end mark in most formats."""
        content, reasoning = "", ""
        calls: list[dict[str, Any]] = []
        for part in [*self._reader.feed(text), *(self._reader.finish() if is_last else ())]:
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
        return content + (self._content.held if is_last else ""), reasoning, calls

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
