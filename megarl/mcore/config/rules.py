"""How rules on a role's Megatron flags are written: each says which values of a flag are allowed.

A function that returns the rules of a topic returns all of them, in the same order, whatever the flags are.
"""

import math
from collections.abc import Iterable, Mapping

from megarl.errors import Rule, UsageError


def require(role: str, args, rules: list[Rule], where: str = ""):
    """Raises UsageError for the first rule that a role's parsed flags break; `where`: where the rules hold."""
    for rule in when(True, rules, where):
        if rule.is_broken:
            raise UsageError(f"{role}: {rule.problem(args)}")


def allow(flag: str, holds: object, allowed: str, value: object = None) -> Rule:
    """A rule that holds for a flag's value; which values are allowed, in words; `value`: as in `Rule`."""
    return Rule(flag, not holds, f"allowed is {allowed}", value)


def value_of(args, flag: str):
    """The value of a flag, with or without its dashes."""
    return getattr(args, flag.removeprefix("--").replace("-", "_"))


def only(args, flag: str, value=None) -> Rule:
    """A flag with one allowed value; None and False: it must not be given."""
    return allow(flag, value_of(args, flag) == value, "none" if value in (None, False) else str(value))


def min_value(args, flag: str, limit: int = 1) -> Rule:
    """A flag whose value, if it is given, is a number not below a limit."""
    value = value_of(args, flag)
    return allow(flag, value is None or value >= limit, f"{limit} or more")


def positive(args, flag: str) -> Rule:
    """A flag whose value, if it is given, is a number above 0."""
    value = value_of(args, flag)
    return allow(flag, value is None or 0 < value < math.inf, "above 0")


def when(condition: object, rules: Iterable[Rule], where: str = "") -> list[Rule]:
    """Rules that hold unless a condition is met; `where`: the condition, in words before what is allowed."""
    return [rule._replace(is_broken=condition and rule.is_broken, reason=where + rule.reason) for rule in rules]


def defaults(args, flags: Mapping[str, object], holds: object, allowed: str) -> list[Rule]:
    """Flags, without dashes, that must have their defaults unless `holds`."""
    return [allow(f"--{name}", holds or value_of(args, name) == default, allowed) for name, default in flags.items()]


def is_pattern(pattern: list[int], layers: int) -> bool:
    """Whether a list has a zero or a one for each layer."""
    return len(pattern) == layers and set(pattern) <= {0, 1}
