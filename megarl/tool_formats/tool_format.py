"""How a family of models writes thoughts, content and tool calls."""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from megarl.tool_formats.formats import HARMONY_THOUGHTS
from megarl.tool_formats.reader import THINK, Grammar, GrammarRule, ThoughtMarks, TurnReader, thoughts
from megarl.tool_formats.written_calls import MAX_CALLS, Tools, WrittenCall

# A user's parser: text without thoughts -> (content, calls as (name, arguments), why what looks like a call is none).
TextParser = Callable[[str], tuple[str, list[tuple[str, dict[str, Any]]], list[str]]]


@dataclass(frozen=True)
class ToolFormat:
    """How a family of models writes thoughts, content and tool calls.

    Attributes:
        rule: makes the grammar of what follows the thoughts, from the tools of the conversation.
        marks: strings that a text needs to have where they are special tokens.
        thoughts: marks around the thoughts at the start of a turn; None: the grammar reads them.
        has_apart: whether answers of the server have thoughts apart from the content.
        writes_ids: whether results of tools refer to the ids that the policy writes.
        id_length: characters, letters and digits, that an id must have; None: any.
        parser: of a user, which reads whole turns.
    """

    rule: GrammarRule
    marks: tuple[str, ...] = ()
    thoughts: tuple[str, str] | None = THINK
    has_apart: bool = True
    writes_ids: bool = False
    id_length: int | None = None
    parser: TextParser | None = None

    @property
    def all_marks(self) -> tuple[str, ...]:
        """`marks` with those of thoughts."""
        return self.marks + (self.thoughts or ())

    @property
    def thought_marks(self) -> ThoughtMarks:
        """What ends thoughts, for a thinking budget."""
        return HARMONY_THOUGHTS if self.thoughts is None else ThoughtMarks(*self.thoughts)

    @property
    def answer_marks(self) -> tuple[str, ...]:
        """Those of an answer of the server."""
        return self.all_marks if self.has_apart else self.marks

    def reader(self, tools: Tools = (), opened: bool | None = None) -> TurnReader:
        """`opened`: whether the prompt has begun the turn's thoughts; None: unknown."""
        return TurnReader(self._grammar(tools, opened))

    def answer_reader(self, tools: Tools, opened: bool) -> TurnReader:
        """A reader of one answer of the server."""
        return self.reader(tools, opened) if self.has_apart else TurnReader(self.rule(tools))

    def call_ids(self, calls: Iterable[WrittenCall], turn: int) -> list[str]:
        """An id for each call of a turn: the one that the policy wrote, if the format has such; all differ."""
        found: dict[str, None] = {}
        for index, call in enumerate(calls):
            own = [call.id] if self.accepts_id(call.id) else []
            # Several, since the policy may have written one of them.
            made = (self.call_id(turn, number) for number in itertools.count(index, MAX_CALLS))
            found[next(each for each in itertools.chain(own, made) if each not in found)] = None
        return list(found)

    def call_id(self, turn: int, index: int) -> str:
        """The id of a call to which the policy gave none."""
        return f"call_{turn}_{index}" if self.id_length is None else f"c{turn % 10**3:03}{index % 10**5:05}"

    def accepts_id(self, written: str | None) -> bool:
        """Whether a call keeps the id that the policy gave it."""
        if not self.writes_ids or not written or len(written) > 256 or not written.isprintable() or " " in written:
            return False
        return self.id_length is None or (len(written) == self.id_length and written.isascii() and written.isalnum())

    def _grammar(self, tools: Tools, opened: bool | None) -> Grammar:
        if self.thoughts is not None:
            yield from thoughts(self.thoughts, opened)
        yield from self.rule(tools)
