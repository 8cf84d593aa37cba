"""Special tokens as strings: where they stand in a text, and marks that keep a user's text from writing them."""

import re
from typing import Callable, Iterable, Mapping

# A Unicode noncharacter: never part of text meant for interchange, and not white space that a template would trim.
MARK, _END = "\ufdd0", "\ufdd1"

# Shown for an id that has no piece, e.g. a row that only pads the embedding to a round size.
NO_PIECE = "\ufffd"


def pattern_of(strings: Iterable[str]) -> re.Pattern[str]:
    """Matches any of `strings`, the longest first; its one group makes `split` keep them. Nothing where none."""
    longest_first = sorted(strings, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")


def encode_pieces(
    text: str, special: Mapping[str, int], pattern: re.Pattern[str], encode: Callable[[str], list[int]]
) -> list[int]:
    """Ids of `text` cut at its special strings, which become their ids; `encode` gives those of what is between."""
    ids: list[int] = []
    for number, piece in enumerate(pattern.split(text)):
        if number % 2:
            ids.append(special[piece])
        elif piece:
            ids += encode(piece)
    return ids


class Marks:
    """Special strings in ordinary text, replaced by marks while a template is rendered around the text.

    Marks themselves are replaced too, so every mark in a marked text is one of ours, whatever the text holds.
    """

    def __init__(self, special: Iterable[str]):
        self._strings = [*special, MARK]
        self._numbers = {string: number for number, string in enumerate(self._strings)}
        self._pattern = pattern_of(self._strings)
        self._marks = re.compile(f"{MARK}([0-9]+){_END}")

    def mark(self, text: str) -> str:
        return self._pattern.sub(lambda found: f"{MARK}{self._numbers[found[0]]}{_END}", text)

    def unmark(self, text: str) -> str:
        """The text that `mark` was given."""
        return self._marks.sub(lambda found: self._strings[int(found[1])], text) if MARK in text else text
