"""From tokens to text, piece by piece: exactly the text that the tokenizer gives for all tokens at once."""

import codecs
import functools
import re
from collections.abc import Collection, Iterable, Mapping

from megarl.data.tokenizers import REPLACEMENT, Tokenizer

_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")
_LEADING = 8  # tokens without text at the start to keep as context


# The characters of byte-level BPE and their bytes (GPT-2's bytes_to_unicode).
_ALPHABET = {chr(byte): byte for byte in (*range(33, 127), *range(161, 173), *range(174, 256))}
_ALPHABET |= {chr(256 + n): byte for n, byte in enumerate(sorted({*range(256)} - {*_ALPHABET.values()}))}


class Vocabulary:
    """A tokenizer's single tokens as strings and bytes, and detokenizers for streams of tokens."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.special = {number: string for string, number in tokenizer.special.items()}
        self.token = functools.lru_cache(2**17)(self._token)
        self.piece_bytes = functools.lru_cache(2**17)(self._piece_bytes)

    def detokenizer(self, kept: Collection[str] = ()) -> "Detokenizer":
        """A new detokenizer for one stream of tokens, whose pieces together are `decode` of all. `feed` gives the text
        that is certain after a token and was not before, never a part of a character; `finish` the rest. `kept`:
        special tokens whose strings are text, too.
        """
        kind = ByteLevelText if self.tokenizer.byte_level else SegmentText
        return kind(self, {number: self.special[number] for number in self.special_ids(kept)})

    def text(self, tokens: Iterable[int], kept: Collection[str] = ()) -> str:
        """Text of whole tokens, as of `detokenizer`."""
        detokenizer = self.detokenizer(kept)
        return "".join([*map(detokenizer.feed, map(int, tokens)), detokenizer.finish()])

    def special_ids(self, strings: Collection[str]) -> frozenset[int]:
        """Ids of those strings that are special tokens."""
        return frozenset(self.tokenizer.special[each] for each in strings if each in self.tokenizer.special)

    def _piece_bytes(self, number: int) -> bytes | None:
        """The bytes that a token stands for whatever surrounds it, or None: byte-level BPE, and byte fallback."""
        piece = self.tokenizer.piece(number)
        if piece is None:
            return None
        if not self.tokenizer.byte_level:
            found = _BYTE.fullmatch(piece)
            return bytes.fromhex(found[1]) if found else None
        try:
            return bytes([_ALPHABET[character] for character in piece])
        except KeyError:
            return piece.encode()

    def _token(self, number: int) -> tuple[str, bytes]:
        """A token as it reads in the middle of a text, and its bytes.

        Special tokens are given by their names; bytes that are no characters read `bytes:\\xe4\\xbd`, as in OpenAI's
        answers.
        """
        if number in self.special:
            return self.special[number], self.special[number].encode()
        data = self.piece_bytes(number)
        if data is None:
            # The second of two: the first one may lose the space in front of it.
            decode = self.tokenizer.decode
            text = decode([number, number])[len(decode([number])) :]
            return text, text.encode()
        try:
            return data.decode(), data
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data), data


class ByteLevelText:
    """Detokenizer of byte-level BPE: each token is some bytes."""

    def __init__(self, vocabulary: Vocabulary, marks: Mapping[int, str]):
        """`marks`: strings of the special tokens that are text; the text around each is whole."""
        self._vocabulary, self._marks = vocabulary, marks
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        if token in self._vocabulary.special:
            return self.finish() + self._marks[token] if token in self._marks else ""
        data = self._vocabulary.piece_bytes(token)
        return self.finish() + REPLACEMENT if data is None else self._decoder.decode(data)

    def finish(self) -> str:
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


class SegmentText:
    """Detokenizer of the others: decodes segments after an anchor, a token with some text.

    A token at the start of a text may lose its space; after an anchor it keeps it, whichever the anchor is. A run of
    byte tokens is one segment, because one invalid byte can change the text of the whole run.
    """

    def __init__(self, vocabulary: Vocabulary, marks: Mapping[int, str]):
        """`marks`: as of `ByteLevelText`."""
        self._vocabulary, self._decode, self._marks = vocabulary, vocabulary.tokenizer.decode, marks
        self._anchor: list[int] = []
        self._anchor_text = ""
        self._segment: list[int] = []

    def feed(self, token: int) -> str:
        if token in self._vocabulary.special:
            return self._feed_special(token)
        self._segment.append(token)
        return "" if self._vocabulary.piece_bytes(token) is not None else self._release(token)

    def _feed_special(self, token: int) -> str:
        """A special token has no text unless it is a mark, but may keep bytes before and after it apart."""
        if token in self._marks:
            return self.finish() + self._marks[token]
        if not self._vocabulary.tokenizer.special_ends_bytes:
            return ""
        text = self.finish()
        if self._anchor and self._anchor[-1] not in self._vocabulary.special:
            self._anchor = [*self._anchor, token]
        return text

    def finish(self) -> str:
        return self._release(self._segment[-1]) if self._segment else ""

    def _release(self, last: int) -> str:
        window = self._anchor + self._segment
        text = self._decode(window)[len(self._anchor_text) :]
        if self._vocabulary.tokenizer.piece(last) is None:
            # What follows an id without a token is decoded apart, like the start of a text.
            self._anchor, self._anchor_text = [], ""
        elif not self._anchor_text:
            alone = self._decode([last])
            self._anchor = [last] if alone else window[-_LEADING:]
            self._anchor_text = alone or self._decode(self._anchor)
        self._segment = []
        return text


Detokenizer = ByteLevelText | SegmentText


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
