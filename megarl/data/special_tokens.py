"""Special tokens as strings: finds them in a text, and marks those in user text so that they stay ordinary text."""

import itertools
import re
from collections.abc import Callable, Iterable, Mapping

# Unicode noncharacters: never in text meant for interchange, and not white space that a template would trim.
MARK, _END = "\ufdd0", "\ufdd1"

# Decoded text of an id without a token, e.g. of a row that only pads the embedding.
REPLACEMENT = "\ufffd"


def pattern_of(strings: Iterable[str]) -> re.Pattern[str]:
    """A pattern that matches any of `strings`, longest first; its one group makes `split` keep them. None: no match."""
    longest_first = sorted(strings, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")


def encode_around_special(
    text: str, special: Mapping[str, int], pattern: re.Pattern[str], encode: Callable[[str], list[int]]
) -> list[int]:
    """Ids of `text`: special strings become their ids, and `encode` gives those of the text between them."""
    ids: list[int] = []
    for number, segment in enumerate(pattern.split(text)):
        if number % 2:
            ids.append(special[segment])
        elif segment:
            ids += encode(segment)
    return ids


def decode_known(ids: Iterable[int], is_known: Callable[[int], bool], decode: Callable[[list[int]], str]) -> str:
    """Text of `ids`, with U+FFFD for each without a token. It stays visible, so that a verifier never sees a clean
    answer where the policy gave none.
    """
    runs = itertools.groupby(ids, key=is_known)
    return "".join(decode(list(run)) if known else REPLACEMENT * len(list(run)) for known, run in runs)


class Marks:
    """Replaces special tokens' strings in user text by marks before a template is rendered around it.

    Marks in the text are replaced too, so every mark in a marked text comes from `mark`, whatever the text holds.
    """

    def __init__(self, special: Iterable[str]):
        self._strings = [*special, MARK]
        self._numbers = {string: number for number, string in enumerate(self._strings)}
        self._pattern = pattern_of(self._strings)
        self._marks = re.compile(f"{MARK}([0-9]+){_END}")

    def mark(self, text: str) -> str:
        return self._pattern.sub(lambda match: f"{MARK}{self._numbers[match[0]]}{_END}", text)

    def unmark(self, text: str) -> str:
        """The original of a marked text."""
        return self._marks.sub(lambda match: self._strings[int(match[1])], text) if MARK in text else text
