"""Chooses which predicted tokens of which requests are worth a row in a decode step.

A decode step costs as much as `FIXED_ROWS` rows before its first row. So a step with few requests tries unlikely tokens
too, and one with many tries only likely ones. A draft is a guess that the engine checks: nothing here changes a
result. Nothing depends on time, so tensor-parallel ranks draft the same tokens.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from megarl.mcore.inference.draft_index import EVIDENCES, LONGEST, DraftIndex, Guess

MAX_DEPTH = 16  # drafted tokens of a request in a step
FIXED_ROWS = 32  # the part of a step's time that does not depend on its rows, in rows
FIRST_RATE = 0.5  # before any guess was checked; counts as two guesses
RATE_MEMORY = 64  # checked guesses over which a rate is averaged
ENOUGH = 0.9  # the first kind of n-gram with this rate is used
MAX_IDLE = 32  # most steps without guesses, after steps in which no guess was worth a row


@dataclass
class DraftedText:
    """The text of a request."""

    prompt_key: int
    tokens: list[int]  # prompt and response so far
    indexed: int  # tokens that need not be indexed any more
    guesses: list[Guess] = field(
        default_factory=list
    )  # of the next tokens: those drafted, at least one if there is one


class Drafter:
    """Drafts for the requests of an engine. Its index outlives the engine's calls, so that it knows earlier steps."""

    def __init__(self, index: DraftIndex | None = None):
        self.index = DraftIndex() if index is None else index
        self.rates = [FIRST_RATE] * EVIDENCES  # share of right guesses by their evidence
        self._checked = [2] * EVIDENCES  # guesses, at most `RATE_MEMORY`
        self._texts: dict[int, DraftedText] = {}  # by request id
        self._end_ids: frozenset[int] = frozenset()
        self._idle = self._next_idle = 0

    def reset(self, end_ids: Iterable[int]):
        """Begins a call of the engine without requests. `end_ids`: tokens that end a response."""
        self._texts.clear()
        self._end_ids = frozenset(end_ids)
        self._idle = self._next_idle = 0

    def begin(self, request_id: int, prompt: Sequence[int]):
        """Adds a request."""
        self._texts[request_id] = DraftedText(hash(tuple(prompt)), list(prompt), max(1, len(prompt)))

    def finish(self, request_id: int, text: Sequence[int]):
        """Indexes the whole text of a request, prompt and response, and removes the request."""
        known = self._texts.pop(request_id)
        self._learn(known, text[len(known.tokens) :])
        self.index.add(known.prompt_key, text, known.indexed)

    def text_of(self, request_id: int) -> DraftedText:
        """Returns the text of a request, as far as it is known."""
        return self._texts[request_id]

    def extend(self, text: DraftedText, generated: Sequence[int]):
        """Adds the tokens that were generated since the last call, and learns from them."""
        self._learn(text, generated)
        text.tokens += generated

    def draft(self, texts: Sequence[DraftedText], room: Sequence[int], max_rows: int) -> list[list[int]]:
        """Returns the tokens to try after each text, none for most if they are not worth it.

        Args:
            room: most tokens to draft for each text.
            max_rows: of the step; each text has one row without drafts.
        """
        for text in texts:
            self.index.add(text.prompt_key, text.tokens, text.indexed)
            text.indexed = len(text.tokens)
            text.guesses = []
        if self._idle > 0:
            self._idle -= 1
            return [[] for _ in texts]
        floor = len(texts) / (FIXED_ROWS + len(texts))
        chances = [self._guess(text, limit, floor) for text, limit in zip(texts, room, strict=True)]
        depths = _worthwhile(chances, max_rows)
        self._next_idle = 0 if any(depths) else min(2 * self._next_idle + 1, MAX_IDLE)
        self._idle = self._next_idle
        for text, depth in zip(texts, depths, strict=True):
            del text.guesses[max(depth, 1) :]
        return [[guess.token for guess in text.guesses[:depth]] for text, depth in zip(texts, depths, strict=True)]

    def _learn(self, text: DraftedText, tokens: Sequence[int]):
        """Takes note of whether the guesses were right; `tokens`: what was generated in their place, and accepted."""
        for guess, token in zip(text.guesses, tokens, strict=False):  # guesses after a wrong one stay unknown
            evidence = guess.evidence
            self._checked[evidence] = checked = min(self._checked[evidence] + 1, RATE_MEMORY)
            self.rates[evidence] += ((guess.token == token) - self.rates[evidence]) / checked

    def _guess(self, text: DraftedText, limit: int, floor: float) -> list[float]:
        """Sets a text's guesses; returns the chance of each that it and all before it are right, down to `floor`."""
        context, chance, chances = text.tokens[-LONGEST:], 1.0, []
        while len(chances) < min(limit, MAX_DEPTH):
            guess = self.index.guess(text.prompt_key, context, self.rates, ENOUGH)
            if guess is None or (guess.token in self._end_ids and text.guesses):
                break
            text.guesses.append(guess)
            chance *= self.rates[guess.evidence]
            # What follows an end token is dropped, so it is guessed only to learn from it.
            if chance < floor or guess.token in self._end_ids:
                break
            chances.append(chance)
            context.append(guess.token)
        return chances


def _worthwhile(chances: list[list[float]], max_rows: int) -> list[int]:
    """Returns how many guesses of each text to try, so that a step generates the most tokens for its time.

    `chances`: of the guesses of each text, descending. A row is worth its time if its chance is above the tokens per
    row's time of the step without it, so it is best to take rows in the order of their chances.
    """
    rows = len(chances)
    tokens, depths = float(rows), [0] * rows
    for chance, i in sorted(((chance, i) for i, row in enumerate(chances) for chance in row), key=lambda x: -x[0]):
        if rows == max_rows or chance * (FIXED_ROWS + rows) <= tokens:
            break
        depths[i] += 1
        rows, tokens = rows + 1, tokens + chance
    return depths
