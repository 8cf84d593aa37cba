"""The types of a manifest's entries: a file that was made by hand, or for harm, is refused before anything reads it."""

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from megarl.mcore.config.parameter_patterns import is_multiplier

MAX_COUNT = 2**53  # of steps, ranks, bytes: exact in every reader of JSON
_DIGEST, _FILE_NAME = re.compile("[0-9a-f]{8,128}"), re.compile(r"[\w.-]+")


class Each(NamedTuple):
    """An object of any names that fit, with values of one kind."""

    kind: Any
    name: Callable[[str], bool] = lambda name: True


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < MAX_COUNT


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and bool(_DIGEST.fullmatch(value))


def _is_file_name(name: str) -> bool:
    """Whether a name is that of a file directly in the folder."""
    return bool(_FILE_NAME.fullmatch(name)) and name.strip(".") != ""


def _is_best(value: Any) -> bool:
    """Whether it is the state of a `BestCheckpoint`: a step, and the value of a metric by its name."""
    return fits(value, {"step": (None, _is_count)}) and all(fits(each, (None, _is_number)) for each in value.values())


def _is_of_schedule(value: Any) -> bool:
    """Whether it is the value of a flag of a schedule: plain, or texts PATTERN=FACTOR."""
    if isinstance(value, list):
        return all(isinstance(text, str) and is_multiplier(text) for text in value)
    return value is None or isinstance(value, str) or _is_number(value)


SEALED = Each({"size": _is_count, "sha256": _is_digest}, _is_file_name)
# What entries of these names are: a type, a function that says whether a value fits, a list of one kind, an object that
# has at least these names, Each, or one of several of these or null. Others may be anything.
ENTRIES: dict[str, Any] = {
    "files": SEALED, "step": _is_count, "world_size": _is_count, "program": str, "seed": int, "vocab_size": _is_count,
    "role": str, "frozen": Each(_is_digest), "layout": Each(dict), "prompt_order": {"position": _is_count, "size": int},
    "steps_skipped": _is_count, "skipped_in_a_row": _is_count, "data": Each({"value": str, "sha256": _is_digest}),
    "versions": Each((None, str)),
    "settings": dict, "schedules": Each(Each(_is_of_schedule)),
    "optimizers": Each({"optimizer": str, "freeze": [str]}),
    "lora": Each({"factors": dict, "base": dict}), "kept_for": str,
    "best": (None, _is_best),
    "reward": (None, {"count": _is_number, "mean": _is_number, "squares": _is_number}),
    "waiting_groups": {"complete": _is_count, "unfinished": _is_count, "samples_per_prompt": _is_count,
                       "fields": [str]},
    "generated_ahead": {"lag": _is_count, "through": _is_count, "steps": [_is_count], "version": _is_count},
}  # fmt: skip


def wrong_entry(manifest: dict[str, Any]) -> str | None:
    """The name of an entry that is not what it should be; None if all are."""
    return next((name for name, kind in ENTRIES.items() if name in manifest and not fits(manifest[name], kind)), None)


def fits(value: Any, kind: Any) -> bool:
    """Whether a value of JSON is of a kind of `ENTRIES`."""
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
