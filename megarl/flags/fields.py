"""Fields of settings: each is a flag. The text under a field is the flag's help."""

import ast
import dataclasses
import functools
import inspect
import urllib.parse
from collections.abc import Callable, Iterable
from typing import Any

from megarl.flags.conditions import Condition

# Programs that share flags.
TRAINING, SUPERVISED, GENERATING = "rl sft reward preference", "sft reward preference", "rl evaluate"
ROLLOUT = "rl evaluate serve"
PAIRS = "preference reward"
DATA = f"{TRAINING} evaluate"
ALL = f"{DATA} serve"


def flag(default: Any, check: Callable | None = None, allowed: str = "", **meta) -> Any:
    """A field of a class of settings.

    Args:
        check: whether a given value is allowed; `allowed` describes these values.
        meta: what `metadata` takes.
    """
    return dataclasses.field(default=default, metadata=metadata(check, allowed, **meta))


def metadata(
    check: Callable | None, allowed: str, *, programs: str = "rl", roles: tuple[str, ...] = (),
    when: Condition | None = None, needs: Condition | None = None, several: bool = False, names: Iterable[str] = (),
) -> dict[str, Any]:  # fmt: skip
    """What the parser reads of a field.

    Args:
        programs: the programs that have the flag.
        roles: roles that may override the value with a prefixed flag.
        when: the condition under which the flag has an effect; otherwise it is dropped with a warning.
        needs: the condition without which a run with the flag is refused.
        several: the flag takes several words, which the value has with spaces between them.
        names: what `{names}` in the help text stands for.
    """
    return {"check": check, "allowed": allowed, "programs": programs.split(), "roles": roles, "when": when,
            "needs": needs, "several": several, "names": names}  # fmt: skip


def positive(default, **meta):
    return flag(default, lambda v: v > 0, "a number above 0", **meta)


def not_negative(default, **meta):
    return flag(default, lambda v: v >= 0, "0 or more", **meta)


def fraction(default, **meta):
    return flag(default, lambda v: 0 <= v <= 1, "between 0 and 1", **meta)


def one_of(default, names: tuple[str, ...], **meta):
    return flag(default, lambda v: v in names, "one of " + ", ".join(names), names=names, **meta)


def address(**meta):
    return flag(None, _is_address, "http://host:port/path, or https", **meta)


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


@functools.cache
def texts(topic: type) -> dict[str, str]:
    """Field -> help text, which is the string under it in the source of the class."""
    (cls,) = ast.parse(inspect.getsource(topic)).body
    assert isinstance(cls, ast.ClassDef)
    found = {}
    for field, text in zip(cls.body, cls.body[1:], strict=False):
        match field, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(written))):
                names = ", ".join(topic.__dataclass_fields__[name].metadata["names"])  # type: ignore[attr-defined]
                found[name] = " ".join(written.split()).replace("{names}", names)
    return found
