"""Stop strings of a rollout: whether a token completes one, whatever tokens it is spread over.

The text of a response is that of its tokens one after the other, special tokens left out, as `decode` reads it.
"""

import functools

from megarl.data.detokenizer import Vocabulary
from megarl.data.special_tokens import REPLACEMENT
from megarl.data.tokenizers import Tokenizer


class StopMatcher:
    """Follows texts token by token. Where a text is, is the longest end of it with which a stop string begins."""

    START = b""  # of a text

    def __init__(self, tokenizer: Tokenizer, stops: tuple[str, ...]):
        """`stops`: not empty, each with some text."""
        self.stops = tuple(stop.encode() for stop in stops)
        self._vocabulary = Vocabulary(tokenizer)
        self._longest = max(map(len, self.stops)) - 1
        self.follow = functools.lru_cache(2**17)(self._follow)

    def _follow(self, place: bytes, token: int) -> tuple[bytes, bool]:
        """(where a text is after one more token, whether the token completes a stop string)."""
        text = place + self._bytes(token)
        # Tokens that a thinking budget forces may have completed one before: then the next one does not complete it.
        is_complete = any(stop in text[max(0, len(place) - len(stop) + 1) :] for stop in self.stops)
        rest = text[max(0, len(text) - self._longest) :]
        while rest and not any(stop.startswith(rest) for stop in self.stops):
            rest = rest[1:]
        return rest, is_complete

    def _bytes(self, token: int) -> bytes:
        if token in self._vocabulary.special:
            return b""
        if self._vocabulary.tokenizer.piece(token) is None:
            return REPLACEMENT.encode()
        return self._vocabulary.token(token)[1]
