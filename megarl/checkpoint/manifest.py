"""manifest.json of a checkpoint: what the run was, and the size and SHA-256 of every file beside it.

SHA-256 finds every damage, `sha256sum` can check it without megarl, and processors since 2019 have instructions for it:
about 2 GB/s a core, faster than most file systems. What is read has a checksum of its own, and entries of known kinds.
"""

import functools
import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

from megarl.errors import UsageError
from megarl.mcore.config.optimizer_flags import is_multiplier
from megarl.observe.files import write_atomically
from megarl.observe.settings_file import installed_version
from megarl.plain_files import open_bytes, read_text
from megarl.plain_values import MAX_COUNT, Each, fits, is_count, is_plain_number, is_whole

NAME = "manifest.json"
FORMAT = 3
MAX_BYTES = 2**28
LIBRARIES = ("megatron-core", "torch", "transformers")
_CHECKSUM = "checksum"  # of all other entries


def versions() -> dict[str, str | None]:
    """Versions of the packages on which a run's numbers depend; None for one that runs from its source."""
    return {name: installed_version(name) for name in ("megarl", *LIBRARIES)}


def write(folder: Path, entries: dict):
    """Writes a checkpoint's manifest, after all files that its entry `files` lists."""
    entries = {**entries, "format": FORMAT}
    write_atomically(folder / NAME, _text({**entries, _CHECKSUM: _digest(entries)}))


def read(folder: Path, flag: str) -> dict:
    """The entries that `write` was given. UsageError for no manifest, so no complete checkpoint, one of another format,
    or a damaged one."""
    try:
        text = read_text(folder / NAME, MAX_BYTES)
        manifest = json.loads(text)
    except FileNotFoundError:
        raise UsageError(f"{flag} {folder}: holds no complete checkpoint ({NAME} is missing)") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{flag} {folder}: {NAME} is damaged ({' '.join(str(error).split())})") from None
    except OSError as error:
        raise UsageError(f"{flag} {folder}: {NAME} cannot be read ({error.strerror})") from None
    if not _has_its_checksum(text):
        raise UsageError(f"{flag} {folder}: {NAME} is damaged (its content does not have its checksum)")
    del manifest[_CHECKSUM]
    if manifest["format"] != FORMAT:
        raise UsageError(f"{flag} {folder}: has format {manifest['format']}; this version reads format {FORMAT}")
    if not {"step", "world_size", "program", "files"} <= manifest.keys():
        raise UsageError(f"{flag} {folder}: {NAME} is damaged (step, world_size, program or files is missing)")
    if name := wrong_entry(manifest):
        raise UsageError(f"{flag} {folder}: {NAME} is damaged ({name} is not what megarl writes)")
    return manifest


def seal(path: Path) -> dict:
    """Size and SHA-256 of a file, which is then on the disk."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        return {"size": os.fstat(file.fileno()).st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def check_sizes(folder: Path, manifest: dict) -> str | None:
    """What is wrong with a checkpoint's list of files: a missing, an unknown, or a truncated one. Reads no file."""
    files = manifest["files"]
    found = {entry.name: entry for entry in os.scandir(folder)}
    for name in sorted(files.keys() - found.keys()):
        return f"{name} is missing"
    for name in sorted(found.keys() - files.keys() - {NAME}):
        return f"{name} is not a file of this checkpoint"
    for name, entry in sorted(files.items()):
        if not found[name].is_file():
            return f"{name} is no regular file"
        size = found[name].stat().st_size
        if size != entry["size"]:
            return f"{name} has {size} bytes, and was written with {entry['size']}"
    return None


def check_content(folder: Path, name: str, entry: dict) -> str | None:
    """What is wrong with the content of one file of a checkpoint; reads it whole."""
    try:
        with open_bytes(folder / name) as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    return None if digest == entry["sha256"] else f"{name} is damaged (its content does not have its checksum)"


@functools.lru_cache(maxsize=16)  # a start reads the same few manifests for each role
def _has_its_checksum(text: str) -> bool:
    """Whether a manifest's text is what `write` makes of its entries."""
    manifest = json.loads(text)
    checksum = manifest.pop(_CHECKSUM, None) if isinstance(manifest, dict) else None
    return checksum == _digest(manifest) and text == _text({**manifest, _CHECKSUM: checksum})


def _digest(entries: dict) -> str:
    return hashlib.sha256(_text(entries).encode()).hexdigest()


def _text(entries: dict) -> str:
    return json.dumps(entries, indent=1, sort_keys=True) + "\n"


# -- kinds of entries: a file that was made by hand, or for harm, is refused before anything reads it -----------------

MAX_SIZE = 2**20  # of a group, and replicas: lists have as many items
_DIGEST, _FILE_NAME = re.compile("[0-9a-f]{8,128}"), re.compile(r"[\w.-]+")


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and bool(_DIGEST.fullmatch(value))


def _is_file_name(name: str) -> bool:
    """Whether a name is that of a file directly in the folder."""
    return bool(_FILE_NAME.fullmatch(name)) and name.strip(".") != ""


def _is_best(value: Any) -> bool:
    """Whether it is the state of a `BestCheckpoint`: a step, and the value of a metric by its name."""
    return fits(value, {"step": (None, is_count)}) and fits(value, Each((None, is_plain_number)))


def _is_of_schedule(value: Any) -> bool:
    """Whether it is the value of a flag of a schedule: plain, or texts PATTERN=FACTOR."""
    if isinstance(value, list):
        return all(isinstance(text, str) and is_multiplier(text) for text in value)
    return value is None or isinstance(value, str) or is_plain_number(value)


def _is_round(value: Any) -> bool:
    """Whether it is a round of saved rollouts: each list has an item for each prompt."""
    kinds = {"lines": [is_count], "kept": [bool], "draws": [[is_count]], "sizes": [lambda n: is_whole(n, 1, MAX_SIZE)]}
    return fits(value, kinds) and len({len(value[name]) for name in kinds}) == 1


def _is_number(value: Any) -> bool:
    """Whether it is a number of a report, which may be NaN."""
    return type(value) is float or is_plain_number(value)


SEALED = Each({"size": is_count, "sha256": _is_digest}, _is_file_name)
# Kinds of entries by name, of checkpoints and of saved rollouts. Others may be anything.
ENTRIES: dict[str, Any] = {
    "files": SEALED, "step": is_count, "world_size": is_count, "program": str,
    "seed": lambda value: is_whole(value, -MAX_COUNT, MAX_COUNT), "vocab_size": is_count,
    "role": str, "frozen": Each(_is_digest), "layout": Each(dict),
    "prompt_order": {"position": is_count, "size": is_count},
    "steps_skipped": is_count, "skipped_in_a_row": is_count, "data": Each({"value": str, "sha256": _is_digest}),
    "versions": Each((None, str)),
    "settings": dict, "schedules": Each(Each(_is_of_schedule)),
    "optimizers": Each({"optimizer": str, "freeze": [str]}),
    "lora": Each({"factors": dict, "base": dict}), "kept_for": str,
    "best": (None, _is_best),
    "reward": (None, {"count": is_plain_number, "mean": is_plain_number, "squares": is_plain_number}),
    "images": lambda value: fits(value, {"tower": _is_digest}) and fits(value, Each((None, str, is_plain_number))),
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
