"""Predicts the next tokens of responses from sequences seen before: an index of n-grams with a fixed amount of memory.

For each n-gram, it keeps the token that followed it most often of late; those of the same prompt's responses are kept
apart, which agree more. The sequences of an engine's requests are arrays, all looked up together, because a decode step
of a small model takes as long as a Python loop over its requests.
Shapes: n contexts, or sequences named by their rows in the arrays; K kinds of n-grams.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megarl.batch import expand_array_counts

# (whether the n-gram is one of this prompt's sequences, n), in the order of preference.
KINDS = ((True, 8), (True, 3), (False, 6), (False, 3))
MAX_CONTEXT = max(length for _, length in KINDS)
NO_TOKEN = -1  # before the first token of a sequence
MAX_DEPTH = 16  # drafted tokens of a request in a step
MAX_COUNT = 7  # an n-gram's count saturates, so that a changed policy is noticed soon
TABLE_BITS = 20
_COUNT_BITS = 3
EVIDENCES = len(KINDS) << _COUNT_BITS
# Random odd numbers: h = Σ factor · (token + 1), so a token's place counts, and `NO_TOKEN` does not.
_FACTORS = (
    2 * np.random.Generator(np.random.PCG64(20)).integers(1 << 63, size=(MAX_CONTEXT, len(KINDS)), dtype=np.uint64) + 1
)
for _kind, (_, _length) in enumerate(KINDS):
    _FACTORS[: MAX_CONTEXT - _length, _kind] = 0
_SALTS = np.arange(1, len(KINDS) + 1, dtype=np.uint64) << np.uint64(56)
_IS_OWN = np.array([is_own for is_own, _ in KINDS], dtype=np.uint64)
_MIXER = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: spreads a hash over the upper bits


class Guesses(NamedTuple):
    """Predicted tokens."""

    tokens: np.ndarray  # [n] int64
    evidence: np.ndarray  # [n] kind of the n-gram and its count, below `EVIDENCES`
    rates: np.ndarray  # [n] share of right guesses with this evidence; −1 without a guess


class DraftIndex:
    """A table of n-grams with one slot for each hash: a new n-gram replaces an older one. So memory and time per token
    are fixed: 16 · 2^bits bytes (16 MiB by default), one look-up per token and kind."""

    def __init__(self, bits: int = TABLE_BITS):
        """`bits`: log2 of the number of n-grams that it holds."""
        self._shift = np.uint64(64 - bits)
        self._hashes = np.zeros(1 << bits, np.uint64)
        self._followers = np.zeros(1 << bits, np.int64)  # token · 8 + count

    def add(self, prompt_keys: np.ndarray, contexts: np.ndarray, tokens: np.ndarray):
        """Adds what followed some contexts. N-grams that come several times in a call count once. `prompt_keys`: [n]
        uint64, the same number for all sequences that begin with the same prompt. `contexts`: [n, `MAX_CONTEXT`] the
        tokens before; `NO_TOKEN` before the sequence begins. `tokens`: [n] the token after each context."""
        hashes, slots = self._find(prompt_keys, contexts)
        known, tokens = self._followers[slots], tokens.astype(np.int64)[:, None]
        counts, is_new = known & MAX_COUNT, self._hashes[slots] != hashes
        confirms = known >> _COUNT_BITS == tokens
        more, less = np.minimum(counts + 1, MAX_COUNT), counts - 1 - (counts > 2)  # forgotten faster than learned
        kept = (known & ~MAX_COUNT) + np.where(confirms, more, less)
        replaces = is_new | ~(confirms | (counts > 1))
        self._followers[slots] = np.where(replaces, (tokens << _COUNT_BITS) + 1, kept)
        self._hashes[slots] = hashes

    def guess(self, prompt_keys: np.ndarray, contexts: np.ndarray, rates: np.ndarray, sufficient: float) -> Guesses:
        """Returns the most reliable guess of the token after each context. `prompt_keys`, `contexts`: as in `add`;
        `rates`: [`EVIDENCES`] share of right guesses; `sufficient`: the first kind with this rate is preferred."""
        hashes, slots = self._find(prompt_keys, contexts)
        followers = self._followers[slots]
        evidence = (followers & MAX_COUNT) + (np.arange(len(KINDS)) << _COUNT_BITS)
        found = np.where(self._hashes[slots] == hashes, rates[evidence], -1.0)
        best = (np.arange(len(contexts)), np.minimum(found, sufficient).argmax(1))
        return Guesses(followers[best] >> _COUNT_BITS, evidence[best], found[best])

    def _find(self, prompt_keys: np.ndarray, contexts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns (hashes, slots) [n, K]; no hash is 0, which stands for an empty slot."""
        hashes = (contexts + 1).astype(np.uint64) @ _FACTORS + _SALTS + prompt_keys[:, None] * _IS_OWN
        hashes ^= hashes >> np.uint64(29)
        hashes *= _MIXER
        return hashes | np.uint64(1), hashes >> self._shift


def folded(tokens: Sequence[int]) -> np.ndarray:
    """Tokens as int32; rows of images, which are negative, as numbers below `NO_TOKEN` that differ as they do."""
    ids = np.asarray(tokens, np.int64)
    mixed = (ids.astype(np.uint64) * _MIXER >> np.uint64(34)).astype(np.int64)
    return np.where(ids < 0, NO_TOKEN - 1 - mixed, ids).astype(np.int32)


class DraftSequences:
    """Up to a number of sequences, each with the guesses of its next tokens that were made last."""

    def __init__(self, count: int, max_length: int):
        """`count`: of sequences at a time; `max_length`: of a sequence in tokens."""
        # Pages of the array that no sequence reaches take no memory.
        self._tokens = np.empty((count, MAX_CONTEXT + max_length), np.int32)
        self._tokens[:, :MAX_CONTEXT] = NO_TOKEN
        self.prompt_keys = np.zeros(count, np.uint64)
        self.lengths, self._indexed = np.zeros(count, np.int64), np.zeros(count, np.int64)
        self.guessed = np.zeros((count, MAX_DEPTH), np.int32)
        self.evidence = np.zeros((count, MAX_DEPTH), np.int32)
        self.guess_counts = np.zeros(count, np.int64)
        self._row_of = np.zeros(max(count, 1), np.int64)  # by request id
        self._ended: list[int] = []  # rows of sequences that are not indexed yet
        self._rest: dict[int, Sequence[int]] = {}  # tokens of those rows that are not added yet
        self.clear()

    def clear(self):
        self._ended.clear()
        self._rest.clear()
        self._free = list(range(len(self.lengths)))

    @property
    def is_full(self) -> bool:
        """Whether `index_all` has to free rows of sequences that ended before another one begins."""
        return not self._free

    def begin(self, request_id: int, prompt: Sequence[int]):
        row, size = self._free.pop(), len(prompt)
        if request_id >= len(self._row_of):
            self._row_of = np.resize(self._row_of, 2 * request_id)
        self._row_of[request_id] = row
        self._tokens[row, MAX_CONTEXT : MAX_CONTEXT + size] = folded(prompt)
        self.prompt_keys[row] = hash(tuple(prompt)) & ((1 << 64) - 1)
        self.lengths[row], self._indexed[row] = size, max(size, 1)
        self.guess_counts[row] = 0

    def rows_of(self, request_ids: np.ndarray) -> np.ndarray:
        """Returns the rows of some requests."""
        return self._row_of[request_ids]

    def end(self, request_id: int, sequence: Sequence[int]):
        """Completes a sequence; `take_ended` and `index_all` do the rest for many sequences together."""
        row = int(self._row_of[request_id])
        self._ended.append(row)
        self._rest[row] = sequence[self.lengths[row] :]

    def take_ended(self) -> tuple[np.ndarray, np.ndarray]:
        """Adds the last tokens of sequences that ended; returns what `extend` does."""
        rest, self._rest = self._rest, {}
        counts = np.array([len(tokens) for tokens in rest.values()], np.int64)
        tokens = np.array([token for tokens in rest.values() for token in tokens], np.int32)
        return self.extend(np.array(list(rest), np.int64), counts, tokens)

    def extend(self, rows: np.ndarray, counts: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Adds tokens [Σ counts] to sequences [n], `counts` [n] to each, and compares the guesses of them with these:
        ([m] evidence of the guesses whose earlier ones were right, [m] whether each is right)."""
        owner, place = expand_array_counts(counts)
        columns = MAX_CONTEXT + self.lengths[rows][owner] + place
        self._tokens[rows[owner], columns] = tokens
        self.lengths[rows] += counts
        is_guessed = place < np.minimum(self.guess_counts[rows], MAX_DEPTH)[owner]
        guessed = rows[owner[is_guessed]], place[is_guessed]
        right = self.guessed[guessed] == tokens[is_guessed]
        first_wrong = np.full(len(rows), MAX_DEPTH)
        np.minimum.at(first_wrong, owner[is_guessed][~right], guessed[1][~right])
        is_checked = guessed[1] <= first_wrong[owner[is_guessed]]
        self.guess_counts[rows] = 0
        return self.evidence[guessed][is_checked], right[is_checked]

    def contexts(self, rows: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Returns [n, `MAX_CONTEXT`] the last tokens of the first `lengths` [n] tokens of some sequences."""
        return self._tokens[rows[:, None], lengths[:, None] + np.arange(MAX_CONTEXT)]

    def index_all(self, rows: np.ndarray | Sequence[int], index: DraftIndex):
        """Adds what is new of sequences `rows`, and of those that ended, to an index; frees the latter."""
        rows = np.concatenate([np.asarray(rows, np.int64), np.array(self._ended, np.int64)])
        owner, place = expand_array_counts(np.maximum(self.lengths[rows] - self._indexed[rows], 0))
        sequences = rows[owner]
        places = self._indexed[sequences] + place
        if len(sequences):
            following = self._tokens[sequences, MAX_CONTEXT + places]
            index.add(self.prompt_keys[sequences], self.contexts(sequences, places), following)
        self._indexed[rows] = np.maximum(self.lengths[rows], self._indexed[rows])
        self._free += self._ended
        self._ended.clear()
