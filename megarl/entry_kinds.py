"""Kinds of the values in files that megarl writes and seals: whoever changes such a file can write its checksum, too.

A kind is a type, a function that says whether a value fits, None (null), a list with the kind of its items, an object
with kinds of the names that it has at least, `Each`, or a tuple of several of these.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from megarl.numbers import is_whole

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
