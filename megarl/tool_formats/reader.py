"""Reads a turn: runs a format's grammar over its text, which comes at once or in pieces, and puts the parts together.

A grammar is a generator. It yields what it wants to read, gets that back, and yields what it has found:

    _, mark = yield Until(("<call>",), CONTENT)      # text up to a mark is content, given out as it comes
    written, mark = yield Until(("</call>",))        # this text is kept, and comes back whole
    yield Calls(written, [attempt(read, written)])

At the end of the text, `mark` is None; a grammar then returns. All of it is linear in the length of the text. Of most
formats the grammar `thoughts` comes first.
"""

import functools
import re
from collections.abc import Callable, Generator, Iterable
from typing import Any, NamedTuple

from megarl.data.messages import CLOSE, OPEN
from megarl.tool_formats.written_calls import MAX_CALLS, TOO_MANY, WrittenCall

CONTENT, REASONING = "content", "reasoning"
THINK = OPEN, CLOSE  # marks of thoughts in most formats


class Until(NamedTuple):
    """Reads up to the first of the marks; gives (kept text, mark, or None at the end). No mark is part of another one.

    `kind`: CONTENT or REASONING, as which the text is given out at once; None: it is kept.
    """

    marks: tuple[str, ...]
    kind: str | None = None


class Begins(NamedTuple):
    """Gives the mark with which the text begins after white space, or None. Nothing is read."""

    marks: tuple[str, ...]


class Back(NamedTuple):
    """Puts a text back, in front of what was not read yet."""

    text: str


class Said(NamedTuple):
    """A text of a kind, found by a grammar or given out while it reads."""

    kind: str
    text: str


class Calls(NamedTuple):
    """Calls that were written as one text; what is none is the reason, in a line."""

    written: str
    found: list[WrittenCall | str]


Part = Said | Calls
Grammar = Generator[Until | Begins | Back | Said | Calls, Any, None]
GrammarRule = Callable[[Any], Grammar]  # of the conversation's tools


class ThoughtMarks(NamedTuple):
    """How a family of models marks its thoughts."""

    begin: str
    end: str
    after: str = "\n\n"  # what it writes between the end and the answer


def thoughts(marks: tuple[str, str], opened: bool | None) -> Grammar:
    """Reads the thoughts of a turn, between these marks. Those that it begins and does not end are all of it.

    `opened`: whether the prompt has begun them; None: unknown, so all text before their end is thoughts.
    """
    begin, end = marks
    begins = yield Begins((begin,))
    if opened is None and not begins:
        text, mark = yield Until((end,))
        yield Said(REASONING, text) if mark else Back(text)
    elif opened or begins:
        if begins:
            yield Until((begin,))  # white space
        yield Until((end,), REASONING)


class TurnReader:
    """Reads one turn; how its text is cut into pieces does not matter."""

    def __init__(self, grammar: Grammar):
        self._grammar = grammar
        self._parts: list[Part] = []  # found and not given out
        self._text = ""  # not read
        self._space: list[str] = []  # white space before it, until it is known what the text begins with
        self._kept: list[str] = []
        self._calls = 0
        self._has_too_many = False
        self._wish: Until | Begins | None = None  # None: the grammar has ended, and the rest is content
        self._advance(None)

    def feed(self, text: str) -> list[Part]:
        """The parts that the text adds."""
        self._text += text
        self._read(is_end=False)
        return self._taken()

    def finish(self) -> list[Part]:
        """The parts that were held back, at the end of the text."""
        self._read(is_end=True)
        if self._has_too_many:
            self._parts.append(Calls("", [TOO_MANY]))
        return self._taken()

    def _taken(self) -> list[Part]:
        taken, self._parts = self._parts, []
        return taken

    def _read(self, is_end: bool):
        at = 0
        while self._wish is not None:
            if isinstance(self._wish, Begins):
                if not self._begin(self._wish, at, is_end):
                    return
                at = 0
                continue
            pattern, beginnings, longest = _compiled(self._wish.marks)
            found = pattern.search(self._text, at)
            if found is not None:
                self._take(self._wish, self._text[at : found.start()])
                at = self._give_back(found.end(), found[0])
                continue
            end = len(self._text) if is_end else _certain(self._text, at, beginnings, longest)
            self._take(self._wish, self._text[at:end])
            if not is_end:
                self._text = self._text[end:]
                return
            at = self._give_back(end, None)
        self._say(CONTENT, self._text[at:])
        self._text = ""

    def _begin(self, wish: Begins, at: int, is_end: bool) -> bool:
        """Whether it is known what the text at `at`, which becomes all that is left, begins with."""
        rest = self._text[at:]
        text = rest.lstrip()
        self._space.append(rest[: len(rest) - len(text)])
        self._text = text
        found = next((mark for mark in wish.marks if text.startswith(mark)), None)
        if found is None and not is_end and any(mark.startswith(text) for mark in wish.marks):
            return False
        self._text, self._space = "".join([*self._space, text]), []
        self._advance(found)
        return True

    def _take(self, wish: Until, text: str):
        if wish.kind is None:
            self._kept.append(text)
        else:
            self._say(wish.kind, text)

    def _give_back(self, end: int, mark: str | None) -> int:
        """Hands the kept text and the mark, which ends at `end`, to the grammar. Returns where the text goes on."""
        kept, self._kept = "".join(self._kept), []
        put_back = self._advance((kept, mark))
        if put_back is None:
            return end
        self._text = put_back + self._text[end:]
        return 0

    def _advance(self, answer: Any) -> str | None:
        """Runs the grammar until it wants to read. Returns the text that it puts back."""
        put_back = None
        self._wish = None
        try:
            wish = self._grammar.send(answer)
            while not isinstance(wish, Until | Begins):
                if isinstance(wish, Back):
                    put_back = wish.text
                elif isinstance(wish, Said):
                    self._say(wish.kind, wish.text)
                elif not self._add(wish):
                    self._grammar.close()
                    return put_back
                wish = self._grammar.send(None)
            self._wish = wish
        except StopIteration:
            pass
        return put_back

    def _say(self, kind: str, text: str):
        if text:
            self._parts.append(Said(kind, text))

    def _add(self, calls: Calls) -> bool:
        """Adds calls; False if there have been too many: then the text of these, and all that follows, is content."""
        room = MAX_CALLS - self._calls
        self._calls += len(calls.found)
        if len(calls.found) <= room:
            self._parts.append(calls)
            return True
        self._has_too_many = True
        if room:
            self._parts.append(calls._replace(found=calls.found[:room]))
        else:
            self._say(CONTENT, calls.written)
        return False


@functools.lru_cache(256)
def _compiled(marks: tuple[str, ...]) -> tuple[re.Pattern[str], frozenset[str], int]:
    """(pattern of the marks, all their proper beginnings, length of the longest of these)."""
    pattern = re.compile("|".join(map(re.escape, marks)) or "(?!)")
    beginnings = frozenset(mark[:end] for mark in marks for end in range(1, len(mark)))
    return pattern, beginnings, max(map(len, beginnings), default=0)


def _certain(text: str, at: int, beginnings: frozenset[str], longest: int) -> int:
    """Where a text ends that cannot be part of a mark, whatever follows."""
    starts = range(max(at, len(text) - longest), len(text))
    return next((start for start in starts if text[start:] in beginnings), len(text))


class TurnParts(NamedTuple):
    """What a turn consists of; `errors`: why texts that look like calls are none, one for each."""

    reasoning: str
    content: str  # a line for each text between calls
    calls: list[WrittenCall]
    errors: list[str]


def joined(parts: Iterable[Part]) -> TurnParts:
    """The turn of all parts that a `TurnReader` has found."""
    reasoning: list[str] = []
    segments: list[list[str]] = [[]]
    found: list[WrittenCall | str] = []
    for part in parts:
        if isinstance(part, Calls):
            segments.append([])
            found += part.found
        else:
            (segments[-1] if part.kind == CONTENT else reasoning).append(part.text)
    content = "\n".join(filter(None, ("".join(segment).strip() for segment in segments)))
    calls = [call for call in found if isinstance(call, WrittenCall)]
    errors = [error for error in found if isinstance(error, str)]
    return TurnParts("".join(reasoning).strip(), content, calls, errors)
