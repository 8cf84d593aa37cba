"""Chooses which predicted tokens of which requests are worth a row in a decode step.

A decode step costs as much as `FIXED_ROWS` rows before its first row. So a step with few requests tries unlikely tokens
too, and one with many tries only likely ones. Following a text costs time itself: while drafts do not gain more than
that, only some prompts are followed, which show when they do. A draft is a guess that the engine checks: nothing here
changes a result. Nothing depends on time, so tensor-parallel ranks draft the same tokens.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from megarl.mcore.inference.draft_index import EVIDENCES, LONGEST, DraftIndex, Guess

MAX_DEPTH = 16  # drafted tokens of a request in a step
# Time, in rows of a small model on one CPU core: of a step before its first row; what drafts add to a step before the
# first drafted row; of a drafted row, which is also looked up and checked.
FIXED_ROWS, DRAFTING_ROWS, DRAFTED_ROW = 32, 16, 1.25
FOLLOWING_ROWS = 0.1  # time of following a request for a step, in rows
FIRST_RATE = 0.5  # before any guess was checked; counts as two guesses
RATE_MEMORY = 64  # checked guesses over which a rate is averaged
ENOUGH = 0.9  # the first kind of n-gram with this rate is used
GAIN_MEMORY = 256  # steps of a request over which the gain is averaged
PROBES = 16  # one prompt of so many is always followed


@dataclass(slots=True)
class DraftedText:
    """The text of a request."""

    prompt_key: int
    tokens: list[int]  # prompt and response, as far as it was followed
    indexed: int  # tokens that need not be indexed any more
    is_followed: bool = False
    guesses: list[Guess] = field(default_factory=list)  # of the next tokens: those drafted, or one to learn from

    @property
    def is_probe(self) -> bool:
        """Whether the text is followed in any case."""
        return self.prompt_key % PROBES == 0


class Drafter:
    """Drafts for the requests of an engine. Its index outlives the engine's calls, so that it knows earlier steps."""

    def __init__(self, index: DraftIndex | None = None):
        self.index = DraftIndex() if index is None else index
        self.rates = [FIRST_RATE] * EVIDENCES  # share of right guesses by their evidence
        self.gain = 1.0  # expected tokens that drafts add to a probe in a step
        self._checked = [2] * EVIDENCES  # guesses, at most `RATE_MEMORY`
        self._texts: dict[int, DraftedText] = {}  # by request id
        self._end_ids: frozenset[int] = frozenset()

    def reset(self, end_ids: Iterable[int]):
        """Begins a call of the engine without requests. `end_ids`: tokens that end a response."""
        self._texts.clear()
        self._end_ids = frozenset(end_ids)

    def begin(self, request_id: int, prompt: Sequence[int]):
        """Adds a request."""
        self._texts[request_id] = DraftedText(hash(tuple(prompt)), list(prompt), max(1, len(prompt)))

    def finish(self, request_id: int, text: Sequence[int]):
        """Removes a request; indexes its whole text, prompt and response, if it was followed."""
        known = self._texts.pop(request_id)
        if known.is_followed:
            self._learn(known, text[len(known.tokens) :])
            self.index.add(known.prompt_key, text, known.indexed)

    def text_of(self, request_id: int) -> DraftedText:
        """Returns the text of a request."""
        return self._texts[request_id]

    def followed(self, texts: Sequence[DraftedText]) -> list[int]:
        """Returns the indices of the texts to follow in this step; the others get no drafts."""
        is_worth_it = self.gain * FIXED_ROWS >= FOLLOWING_ROWS * len(texts)
        for text in texts:
            text.is_followed = is_worth_it or text.is_probe
        return [i for i, text in enumerate(texts) if text.is_followed]

    def extend(self, text: DraftedText, generated: Sequence[int]):
        """Adds the tokens that were generated since the last call, and learns from them."""
        self._learn(text, generated)
        text.tokens += generated

    def draft(self, texts: Sequence[DraftedText], room: Sequence[int], rows: int, max_rows: int) -> list[list[int]]:
        """Returns the tokens to try after each followed text, none where they are not worth it.

        Args:
            room: most tokens to draft for each text.
            rows: of the step without drafts; if more than there are texts, these only show what drafts would gain.
            max_rows: of the step.
        """
        floor, chances = rows / (FIXED_ROWS + rows), []
        for text, limit in zip(texts, room, strict=True):
            self.index.add(text.prompt_key, text.tokens, text.indexed)
            text.indexed = len(text.tokens)
            chances.append(self._guess(text, limit, floor))
        drafts, share = [], len(texts) / rows
        for text, chance, depth in zip(texts, chances, worthwhile(chances, share, max_rows), strict=True):
            if text.is_probe:  # others may lack earlier responses because they were not followed
                self.gain += (sum(chance[:depth]) - self.gain) / GAIN_MEMORY
            drafts.append([guess.token for guess in text.guesses[:depth]] if share == 1 else [])
            del text.guesses[max(len(drafts[-1]), 1) :]
        return drafts

    def _learn(self, text: DraftedText, tokens: Sequence[int]):
        """Takes note of which guesses were right; `tokens`: what was drawn, up to the first wrong one."""
        for guess, token in zip(text.guesses, tokens, strict=False):
            rate = self.rates[guess.evidence]
            self._checked[guess.evidence] = checked = min(self._checked[guess.evidence] + 1, RATE_MEMORY)
            self.rates[guess.evidence] += ((guess.token == token) - rate) / checked
        text.guesses = []

    def _guess(self, text: DraftedText, limit: int, floor: float) -> list[float]:
        """Sets a text's guesses; returns the chance of each that it and all before it are right, down to `floor`."""
        context, chance, chances, guesses = text.tokens[-LONGEST:], 1.0, [], []
        while len(chances) < min(limit, MAX_DEPTH):
            guess = self.index.guess(text.prompt_key, context, self.rates, ENOUGH)
            # What follows an end token is dropped, so it is guessed only to learn from it.
            is_end = guess is not None and guess.token in self._end_ids
            if guess is None or (is_end and guesses):
                break
            guesses.append(guess)
            chance *= self.rates[guess.evidence]
            if chance < floor or is_end:
                break
            chances.append(chance)
            context.append(guess.token)
        text.guesses = guesses
        return chances


def worthwhile(chances: list[list[float]], share: float, max_rows: int) -> list[int]:
    """Returns how many guesses of each text to try, so that a step generates the most tokens for its time.

    It is best to take rows in the order of their chances, as long as a row generates more tokens for its time than the
    step without it.

    Args:
        chances: of the guesses of each text, descending.
        share: the texts' share of the step's requests.
        max_rows: of the step.
    """
    rows, depths = len(chances), [0] * len(chances)
    tokens, undrafted = float(rows), share * FIXED_ROWS + rows
    time = undrafted + share * DRAFTING_ROWS
    by_chance = sorted(((chance, i) for i, row in enumerate(chances) for chance in row), key=lambda x: -x[0])
    for chance, i in by_chance[: max(max_rows - rows, 0)]:
        if chance * time <= tokens * DRAFTED_ROW:
            break
        depths[i] += 1
        tokens, time = tokens + chance, time + DRAFTED_ROW
    is_faster = tokens * undrafted > rows * time
    return depths if is_faster else [0] * len(chances)
