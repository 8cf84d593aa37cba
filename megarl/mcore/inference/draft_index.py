"""Predicts the next tokens of responses from sequences seen before: an index of n-grams with a fixed amount of memory.

For each n-gram, the index keeps the token that followed it most often of late. N-grams of the same prompt's responses
are kept apart from those of all sequences: siblings in a group and responses of earlier steps agree with a response
more than other sequences do. A prediction is only a guess: whoever uses it checks it.
Shapes: n contexts, K kinds of n-grams. All requests of a step are looked up together, because a decode step of a small
model takes as long as a Python loop over its requests.
"""

from typing import NamedTuple

import numpy as np

# (whether the n-gram is one of this prompt's sequences, n), in the order of preference.
KINDS = ((True, 8), (True, 3), (False, 6), (False, 3))
MAX_CONTEXT = max(length for _, length in KINDS)
NO_TOKEN = -1  # before the first token of a sequence
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
    """A table of n-grams with one slot for each hash: a new n-gram replaces an older one with the same slot.

    So memory and time per token are fixed whatever the sequences contain: 16 · 2^bits bytes (16 MiB by default), one
    look-up per token and kind.
    """

    def __init__(self, bits: int = TABLE_BITS):
        """`bits`: log2 of the number of n-grams that it holds."""
        self._shift = np.uint64(64 - bits)
        self._hashes = np.zeros(1 << bits, np.uint64)
        self._followers = np.zeros(1 << bits, np.int64)  # token · 8 + count

    def add(self, prompt_keys: np.ndarray, contexts: np.ndarray, tokens: np.ndarray):
        """Adds what followed some contexts. N-grams that come several times in a call count once.

        Args:
            prompt_keys: [n] uint64, the same number for all sequences that begin with the same prompt.
            contexts: [n, `MAX_CONTEXT`] the tokens before; `NO_TOKEN` before the sequence begins.
            tokens: [n] the token after each context.
        """
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
        """Returns the most reliable guess of the token after each context.

        Args:
            prompt_keys, contexts: as in `add`.
            rates: [`EVIDENCES`] share of right guesses, for each evidence.
            sufficient: the first kind with this rate is preferred to better ones.
        """
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
