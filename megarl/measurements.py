"""Named values that come from outside and become metrics: parts of rewards, and tasks, by which evaluations are split.

Functions of the user, environments, agents, drivers of sessions, servers and files give them. All have one rule, so
that no name breaks a file of metrics, a tracker or a terminal, no value makes a sum infinite, and no caller makes
columns without end.
"""

from collections.abc import Iterable
from decimal import Decimal
from numbers import Real
from typing import Any

from megarl.plain_values import is_finite
from megarl.user_results import number_of, shown

MAX_NAME = 100  # characters
_MAX_METRIC = 200
MAX_TASKS = 256  # of an evaluation
MAX_PARTS = 64  # of one result, and names of parts in a run
MAX_VALUE = 1e9  # fp32 holds sums of millions of its squares
ALLOWED_NAMES = f"1 to {MAX_NAME} printable characters without \\, with a name before and after each /"


def is_name(name: Any) -> bool:
    """Whether a value may be a part of a metric's name. Between slashes there are no blank ends, and not only dots."""
    return isinstance(name, str) and len(name) <= MAX_NAME and is_metric(name)


def is_metric(name: str) -> bool:
    """Whether a text in a file may be the whole name of a metric, in which names of parts are."""
    if not 0 < len(name) <= _MAX_METRIC or not name.isprintable() or "\\" in name:
        return False
    return all(each == each.strip() and each.strip(".") for each in name.split("/"))


def value_of(what: str, value: Any) -> float:
    """The number that a value is. ValueError, about `what`, unless it is one from -MAX_VALUE to MAX_VALUE."""
    number = number_of(value)
    if number is None or not is_finite(number):
        is_number = number is not None and isinstance(value, Real | Decimal)  # its digits may be millions
        raise ValueError(f"{what} is {f'{number:g}' if is_number else shown(value)}, not a finite number")
    if abs(number) > MAX_VALUE:
        raise ValueError(f"{what} is {number:g}; allowed is -{MAX_VALUE:g} to {MAX_VALUE:g}")
    return number


def parts_of(parts: Any) -> dict[str, float]:
    """The named parts of a result, as plain numbers. ValueError, in a line, for what breaks the rule."""
    if not isinstance(parts, dict):
        raise ValueError(f"parts is {shown(parts)}, not a dict")
    if len(parts) > MAX_PARTS:
        raise ValueError(f"parts has {len(parts):,} names; allowed are {MAX_PARTS}")
    for name in parts:
        if not is_name(name):
            raise ValueError(f"parts has the name {name!r:.120}; allowed are {ALLOWED_NAMES}")
    return {str(name): value_of(name, value) for name, value in parts.items()}


class NamesOfRun:
    """The names of parts that a run has had. The first `MAX_PARTS` stay, in whatever steps they come.

    `had_more`: names without room were to be added.
    """

    def __init__(self):
        self._known: set[str] = set()
        self.had_more = False

    def __contains__(self, name: str) -> bool:
        return name in self._known

    def beyond(self, names: Iterable[str]) -> list[str]:
        """Those of the names for which there is no room, the last ones in the order of the alphabet."""
        new = sorted({*names} - self._known)
        return new[MAX_PARTS - len(self._known) :]

    def add(self, names: Iterable[str]):
        """Adds the names for which there is room."""
        names, beyond = {*names}, self.beyond(names)
        self._known |= names.difference(beyond)
        self.had_more |= bool(beyond)
