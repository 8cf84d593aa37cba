"""Values that a file, a request or a user's code gives: what counts as a number, whole text, and the kinds of entries.

`math.isfinite` raises for a whole number that no float holds, and so does `float`. JSON's escapes write halves of
surrogate pairs, which UTF-8 and every tokenizer refuse. Kinds are for files that megarl writes and seals: whoever
changes such a file can write its checksum, too.
"""

import re
import sys
from collections.abc import Callable
from numbers import Real
from typing import Any, NamedTuple

MAX_DIGITS = 300  # of a number in a file: a float holds it
_MAX = sys.float_info.max


def is_finite(value: Any) -> bool:
    """Whether a value that code gives is a finite number, and a float holds it. True counts as 1, as in Python."""
    return isinstance(value, Real) and abs(value) <= _MAX  # type: ignore[operator]


def is_plain_number(value: Any) -> bool:
    """Whether a value of JSON or YAML is a finite number. Truth values are none."""
    return type(value) in (int, float) and is_finite(value)


def is_whole(value: Any, low: int, high: int) -> bool:
    """Whether a value is a whole number in a range, both ends included."""
    return type(value) is int and low <= value <= high


_HALF = re.compile("[\ud800-\udfff]")


def is_unicode(text: str) -> bool:
    """Whether a text has no half of a surrogate pair."""
    return text.isascii() or _HALF.search(text) is None


def whole_unicode(text: str) -> str:
    """The text with halves that make a pair joined, and U+FFFD for each other one."""
    return text if is_unicode(text) else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


MAX_COUNT = 2**53  # of steps, ranks, bytes: exact in every reader of JSON


class Each(NamedTuple):
    """An object of any names that fit, with values of one kind."""

    kind: Any
    name: Callable[[str], bool] = lambda name: True


def is_count(value: Any) -> bool:
    """Whether a value is a whole number, 0 or more, that every reader of JSON has exactly."""
    return is_whole(value, 0, MAX_COUNT - 1)


def fits(value: Any, kind: Any) -> bool:
    """Whether a value of JSON is of a kind."""
    if kind is None:
        return value is None
    if isinstance(kind, Each):
        return isinstance(value, dict) and all(
            kind.name(name) and fits(each, kind.kind) for name, each in value.items()
        )
    if isinstance(kind, tuple):
        return any(fits(value, each) for each in kind)
    if isinstance(kind, list):
        return isinstance(value, list) and all(fits(each, kind[0]) for each in value)
    if isinstance(kind, dict):
        return isinstance(value, dict) and all(name in value and fits(value[name], of) for name, of in kind.items())
    if isinstance(kind, type):
        return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
    return kind(value)
