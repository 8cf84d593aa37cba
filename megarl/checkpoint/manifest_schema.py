"""The types of a manifest's entries: a file that was made by hand, or for harm, is refused before anything reads it."""

import re
from typing import Any

from megarl.mcore.config.optimizer_flags import is_multiplier
from megarl.plain_values import MAX_COUNT, Each, fits, is_count, is_plain_number, is_whole

MAX_SIZE = 2**20  # of a group, and replicas: lists have as many items
_DIGEST, _FILE_NAME = re.compile("[0-9a-f]{8,128}"), re.compile(r"[\w.-]+")


def _is_seed(value: Any) -> bool:
    return is_whole(value, -MAX_COUNT, MAX_COUNT)


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and bool(_DIGEST.fullmatch(value))


def _is_file_name(name: str) -> bool:
    """Whether a name is that of a file directly in the folder."""
    return bool(_FILE_NAME.fullmatch(name)) and name.strip(".") != ""


def _is_best(value: Any) -> bool:
    """Whether it is the state of a `BestCheckpoint`: a step, and the value of a metric by its name."""
    return fits(value, {"step": (None, is_count)}) and all(
        fits(each, (None, is_plain_number)) for each in value.values()
    )


def _is_of_schedule(value: Any) -> bool:
    """Whether it is the value of a flag of a schedule: plain, or texts PATTERN=FACTOR."""
    if isinstance(value, list):
        return all(isinstance(text, str) and is_multiplier(text) for text in value)
    return value is None or isinstance(value, str) or is_plain_number(value)


def _is_round(value: Any) -> bool:
    """Whether it is a round of saved rollouts: each list has an item for each prompt."""
    if not fits(value, {"lines": [is_count], "kept": [bool], "kinds": [str]}):
        return False
    optional = {"sizes": [lambda size: is_whole(size, 1, MAX_SIZE)], "draws": [[is_count]]}
    lists = [value["kept"], *(value[name] for name in optional if name in value)]
    return all(fits(value[name], kind) for name, kind in optional.items() if name in value) and all(
        len(each) == len(value["lines"]) for each in lists
    )


def _is_number(value: Any) -> bool:
    """Whether it is a number of a report, which may be NaN."""
    return type(value) is float or is_plain_number(value)


SEALED = Each({"size": is_count, "sha256": _is_digest}, _is_file_name)
# Kinds of entries by name, of checkpoints and of saved rollouts. Others may be anything.
ENTRIES: dict[str, Any] = {
    "files": SEALED, "step": is_count, "world_size": is_count, "program": str, "seed": _is_seed, "vocab_size": is_count,
    "role": str, "frozen": Each(_is_digest), "layout": Each(dict),
    "prompt_order": {"position": is_count, "size": is_count},
    "steps_skipped": is_count, "skipped_in_a_row": is_count, "data": Each({"value": str, "sha256": _is_digest}),
    "versions": Each((None, str)),
    "settings": dict, "schedules": Each(Each(_is_of_schedule)),
    "optimizers": Each({"optimizer": str, "freeze": [str]}),
    "lora": Each({"factors": dict, "base": dict}), "kept_for": str,
    "best": (None, _is_best),
    "reward": (None, {"count": is_plain_number, "mean": is_plain_number, "squares": is_plain_number}),
    "waiting_groups": {"complete": is_count, "unfinished": is_count, "samples_per_prompt": is_count,
                       "fields": [str]},
    "rounds": [_is_round], "replicas": lambda value: is_whole(value, 1, MAX_SIZE), "layers": (None, [is_count]),
    "waiting": is_count, "order": {"position": is_count, "size": is_count}, "tokens": is_plain_number,
    "metrics": Each(_is_number), "longest": is_count, "version": is_count, "environment": (None, str),
    "samples_per_prompt": lambda value: is_whole(value, 1, MAX_SIZE), "prompts_per_step": is_count,
    "generated_ahead": {"lag": is_count, "through": is_count, "steps": [is_count], "version": is_count},
}  # fmt: skip


def wrong_entry(manifest: dict[str, Any]) -> str | None:
    """The name of an entry that is not what it should be; None if all are."""
    return next((name for name, kind in ENTRIES.items() if name in manifest and not fits(manifest[name], kind)), None)
