"""Predicts the next tokens of a response from texts seen before: an index of n-grams with a fixed amount of memory.

For each n-gram, the index keeps the token that followed it most often of late. N-grams of the same prompt's responses
are kept apart from those of all texts: siblings in a group and responses of earlier steps agree with a response more
than other texts do. A prediction is only a guess: whoever uses it checks it.
"""

from array import array
from collections.abc import Sequence
from typing import NamedTuple

# (whether the n-gram is one of this prompt's texts, n), in the order in which they are asked.
KINDS = ((True, 8), (True, 3), (False, 6), (False, 3))
LONGEST = max(length for _, length in KINDS)
MAX_COUNT = 7  # an n-gram's count saturates, so that a changed policy is noticed soon
TABLE_BITS = 20
_COUNT_BITS = 3


class Guess(NamedTuple):
    """A predicted token, and what its reliability depends on."""

    token: int
    evidence: int  # kind of the n-gram and its count, below `EVIDENCES`


EVIDENCES = len(KINDS) << _COUNT_BITS


class DraftIndex:
    """A table of n-grams with one slot for each hash: a new n-gram replaces an older one with the same slot.

    So memory and time per token are fixed whatever the texts contain: 16 · 2^bits bytes (16 MiB by default), four
    look-ups per token.
    """

    def __init__(self, bits: int = TABLE_BITS):
        """`bits`: log2 of the number of n-grams that it holds."""
        self._mask = (1 << bits) - 1
        self._hashes = array("q", bytes(8 << bits))
        self._followers = array("q", bytes(8 << bits))  # token · 8 + count

    def add(self, prompt_key: int, text: Sequence[int], start: int):
        """Adds what follows the n-grams that end before each token of text[start:].

        Args:
            prompt_key: the same number for all texts that begin with the same prompt.
            text: prompt and response so far.
            start: tokens of `text` that were added before, or are no response; at least 1.
        """
        hashes, followers, mask = self._hashes, self._followers, self._mask
        for end in range(start, len(text)):
            token = text[end]
            for is_own, length in KINDS:
                first = end - length
                context = hash((prompt_key + length if is_own else length, *text[first if first > 0 else 0 : end]))
                slot = context & mask
                if hashes[slot] != context:
                    hashes[slot], followers[slot] = context, token << _COUNT_BITS | 1
                    continue
                known = followers[slot]
                count = known & MAX_COUNT
                if known >> _COUNT_BITS == token:
                    followers[slot] = known + (count < MAX_COUNT)
                elif count > 1:
                    followers[slot] = known - 1 - (count > 2)  # noticed faster than it was learned
                else:
                    followers[slot] = token << _COUNT_BITS | 1

    def guess(self, prompt_key: int, context: Sequence[int], rates: Sequence[float], enough: float) -> Guess | None:
        """Returns the most reliable guess of the token after `context`; None without one.

        Args:
            context: the last tokens of a text, at least `LONGEST` of them if it has as many.
            rates: share of right guesses, for each evidence.
            enough: the first guess with this rate is taken.
        """
        hashes, mask, best, best_rate = self._hashes, self._mask, None, 0.0
        size = len(context)
        for kind, (is_own, length) in enumerate(KINDS):
            first = size - length
            found = hash((prompt_key + length if is_own else length, *context[first if first > 0 else 0 :]))
            slot = found & mask
            if hashes[slot] != found:
                continue
            follower = self._followers[slot]
            evidence = kind << _COUNT_BITS | follower & MAX_COUNT
            if rates[evidence] > best_rate:
                best, best_rate = Guess(follower >> _COUNT_BITS, evidence), rates[evidence]
                if best_rate >= enough:
                    break
        return best
