"""Fields of settings: each is a flag with its help text, allowed values, programs, and when it has an effect."""

import dataclasses
import urllib.parse
from collections.abc import Callable

# Programs that share flags.
TRAINING, SUPERVISED, GENERATING = "rl sft reward preference", "sft reward preference", "rl evaluate"
ROLLOUT = "rl evaluate serve"
DATA = f"{TRAINING} evaluate"
ALL = f"{DATA} serve"


def flag(default, text: str, check: Callable | None = None, allowed: str = "", programs: str = "rl",
          roles: tuple[str, ...] = (), when: str | None = None, several: bool = False):  # fmt: skip
    """A field of a class of settings.

    Args:
        text: help text.
        check: whether a given value is allowed; `allowed` describes these values.
        programs: the programs that have the flag.
        roles: roles that may override the value with a prefixed flag.
        when: name of the condition under which the flag has an effect.
        several: the flag takes several words, which the value has with spaces between them.
    """
    meta = {"help": text, "check": check, "allowed": allowed, "programs": programs.split(), "roles": roles}
    return dataclasses.field(default=default, metadata=meta | {"when": when, "several": several})


def positive(default, text, **kw):
    return flag(default, text, lambda v: v > 0, "a number above 0", **kw)


def not_negative(default, text, **kw):
    return flag(default, text, lambda v: v >= 0, "0 or more", **kw)


def fraction(default, text, **kw):
    return flag(default, text, lambda v: 0 <= v <= 1, "between 0 and 1", **kw)


def address(text, **kw):
    return flag(None, text, _is_address, "http://host:port/path, or https", **kw)


def _is_address(text: str) -> bool:
    try:
        parts = urllib.parse.urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of a wrong port, or brackets
        return False


def parses(parse: Callable) -> Callable[[str], bool]:
    """The check of a flag whose text `parse` must take; it raises ValueError for a wrong one."""

    def check(text: str) -> bool:
        try:
            parse(text)
        except ValueError:
            return False
        return True

    return check


def parse_ints(text: str, least: int = 0) -> tuple[int, ...]:
    """`"1,4,8"` -> (1, 4, 8). ValueError unless every item is a whole number, `least` or more."""
    numbers = tuple(int(item) for item in text.split(","))
    if min(numbers) < least:
        raise ValueError(f"{text!r} has a number below {least}")
    return numbers


def one_of(default, names: tuple[str, ...], text, **kw):
    return flag(default, text, lambda v: v in names, "one of " + ", ".join(names), **kw)
