"""Numbers that a file, a request or a user's code gives: what counts as one.

`math.isfinite` raises for a whole number that no float holds, and so does `float`. Whoever takes a number from outside
asks here.
"""

import sys
from numbers import Real
from typing import Any

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
