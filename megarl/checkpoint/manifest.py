"""manifest.json of a checkpoint: what the run was, and the size and SHA-256 of every file beside it.

SHA-256 finds every damage, `sha256sum` can check it without megarl, and processors since 2019 have instructions for it:
about 2 GB/s a core, faster than most file systems.
"""

import functools
import hashlib
import json
import os
from pathlib import Path

from megarl.checkpoint.manifest_schema import wrong_entry
from megarl.errors import UsageError
from megarl.observe.files import write_atomically
from megarl.observe.settings_file import installed_version
from megarl.plain_files import open_bytes, read_text

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
    """The entries that `write` was given.

    Raises:
        UsageError: no manifest, so no complete checkpoint; one of another format; or a damaged one.
    """
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
