"""Gives a written checkpoint its name, and removes older ones, so that a kill at any instant leaves complete ones.

A checkpoint is written under another name, `.writing-step_%08d`, and renamed when every file and the manifest are on
the disk. The pointers `latest` and `best` are written after that and changed before a checkpoint is removed.
"""

import hashlib
import json
import shutil
from pathlib import Path

from megarl.checkpoint import folders
from megarl.checkpoint import manifest as manifests
from megarl.checkpoint.folders import BEST, FROZEN, LATEST
from megarl.errors import UsageError
from megarl.observe.files import step_of, sync_directory

SKIPPED_IN_A_ROW = "skipped_in_a_row"  # the manifest's number of steps up to its own that skipped an update
WRITING, REMOVED = ".writing-", ".removed-"  # prefixes of folders that are being written and removed


def writing_folder(run: Path, name: str) -> Path:
    """The folder in which a checkpoint is written until it gets its name."""
    return Path(run) / "checkpoints" / f"{WRITING}{name}"


def make_room(run: Path, name: str):
    """Creates an empty `writing_folder` and removes what a killed run left."""
    writing = writing_folder(run, name)
    writing.parent.mkdir(parents=True, exist_ok=True)
    discard(run)
    writing.mkdir()


def discard(run: Path, ignore_errors: bool = False):
    """Removes half-written checkpoints."""
    for unfinished in (Path(run) / "checkpoints").glob(f"{WRITING}*"):
        shutil.rmtree(unfinished, ignore_errors=ignore_errors)


def sweep(run: Path):
    """Removes older checkpoints that were renamed for it, also by a run that was killed. May run in a thread."""
    for removed in (Path(run) / "checkpoints").glob(f"{REMOVED}*"):
        shutil.rmtree(removed, ignore_errors=True)


def commit(run: Path, step: int, entries: dict, files: dict[str, dict]):
    """Makes what was written into the folder of `make_room` the step's checkpoint, then the latest.

    `best` then names the step `entries["best"]["step"]`, this one or an earlier one, if its checkpoint exists.
    `entries`: of the manifest; `files`: `manifest.seal` of every file by name.
    """
    folder = folders.step_folder(run, step)
    writing = writing_folder(run, folder.name)
    manifests.write(writing, {"step": step, **entries, "files": files})
    _replace(writing, folder)
    folders.point(folder.parent, LATEST, folder)
    best = (entries.get("best") or {}).get("step")
    if best is not None and (folders.step_folder(run, best) / folders.MANIFEST).is_file():
        commit_best(run, best)


def commit_alone(run: Path, step: int, entries: dict, files: dict[str, dict]):
    """As `commit`, without pointers; others stay until `keep_alone`."""
    folder = folders.step_folder(run, step)
    manifests.write(writing_folder(run, folder.name), {"step": step, **entries, "files": files})
    _replace(writing_folder(run, folder.name), folder)


def keep_alone(run: Path, step: int):
    """Removes all checkpoints but that of a step."""
    for other in folders.complete(Path(run) / "checkpoints"):
        if other != folders.step_folder(run, step):
            remove(other)
    sweep(run)


def commit_frozen(run: Path, entries: dict, files: dict[str, dict]) -> str:
    """Gives weights that many checkpoints share a name that follows from their content, and returns it.

    Arguments as of `commit`. If the run's folder has the same weights already, these are kept.
    """
    digest = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()[:16]
    writing, folder = writing_folder(run, FROZEN), Path(run) / "checkpoints" / FROZEN / digest
    manifests.write(writing, {**entries, "files": files})
    folder.parent.mkdir(exist_ok=True)
    if folder.exists():
        try:
            folders.check(folder, "--save")
        except UsageError:
            shutil.rmtree(folder)
        else:
            shutil.rmtree(writing)
            return digest
    writing.rename(folder)
    sync_directory(folder.parent)
    return digest


def _replace(writing: Path, folder: Path):
    """Gives a written checkpoint its name; an older one with this name is no longer named by a pointer, then goes."""
    checkpoints = folder.parent
    if folder.exists():
        if folders.named(checkpoints, LATEST) == folder:
            others = [other for other in folders.complete(checkpoints) if other != folder]
            folders.point(checkpoints, LATEST, others[-1] if others else None)
        if folders.named(checkpoints, BEST) == folder:
            folders.point(checkpoints, BEST, None)
        remove(folder)
    writing.rename(folder)
    sync_directory(checkpoints)


def restart_from(checkpoints: Path, latest: Path | None, stale: list[Path]):
    """Makes `latest` name a checkpoint, or none, and `best` none of the stale ones: the best before, if it exists."""
    best, before = folders.named(checkpoints, BEST), None
    if best in stale and latest is not None:
        step = (folders.read_manifest(latest, "--load").get("best") or {}).get("step")
        before = None if step is None else folders.step_folder(checkpoints.parent, step)
    folders.point(checkpoints, LATEST, latest)
    if best in stale:
        exists = before in folders.complete(checkpoints) and before not in stale
        folders.point(checkpoints, BEST, before if exists else None)


def commit_best(run: Path, step: int):
    """Marks a complete checkpoint as the best, then removes those that were kept only as earlier best ones.

    These have `"kept_for": "best"` in their manifests. The latest checkpoint is kept until a later one exists.
    """
    folder = folders.step_folder(run, step)
    if folders.named(folder.parent, BEST) != folder:
        folders.point(folder.parent, BEST, folder)
    for other in folders.complete(folder.parent):
        if other in (folder, folders.named(folder.parent, LATEST)):
            continue
        if (manifest := _manifest(other)) and manifest.get("kept_for") == "best":
            remove(other)


def prune(run: Path, last: int, every: int, used: list[Path]):
    """Gives checkpoints another name that `sweep` removes: all but the newest `last` (0: all are kept), every step that
    `every` divides, and the best.

    Those that `latest` names, that are `used`, or whose manifest cannot be read stay, too. While updates are skipped,
    checkpoints hold the weights of an update that may have broken them, so the newest `last` from before stay as well.
    """
    if not last:
        return
    checkpoints = Path(run) / "checkpoints"
    found = {folder: _manifest(folder) for folder in folders.complete(checkpoints)}
    sound = [folder for folder, manifest in found.items() if manifest and not manifest.get(SKIPPED_IN_A_ROW)]
    kept = {path.resolve() for path in (*list(found)[-last:], *sound[-last:], *used)}
    kept |= {path.resolve() for path in (folders.named(checkpoints, pointer) for pointer in (LATEST, BEST)) if path}
    for folder, manifest in found.items():
        if folder.resolve() in kept or manifest is None or (every and step_of(folder) % every == 0):
            continue
        remove(folder)
    _prune_frozen(checkpoints)


def _prune_frozen(checkpoints: Path):
    """Renames shared weights that no checkpoint names any more, also none of an abandoned branch, for `sweep`."""
    found = [_manifest(path.parent) for path in checkpoints.rglob(f"step_*/{folders.MANIFEST}")]
    if None in found:  # it may name any
        return
    kept = {digest for manifest in found for digest in manifest.get(FROZEN, {}).values()}
    for folder in (checkpoints / FROZEN).glob("*"):
        if folder.name not in kept:
            folder.rename(checkpoints / f"{REMOVED}{folder.name}")


def _manifest(folder: Path) -> dict | None:
    """The manifest of a checkpoint; None if it cannot be read."""
    try:
        return folders.read_manifest(folder, "--save")
    except UsageError:
        return None


def remove(folder: Path):
    """Renames a checkpoint for `sweep`, so that no reader sees it half-removed."""
    target = folder.with_name(f"{REMOVED}{folder.name}")
    if target.exists():  # a killed run left it
        shutil.rmtree(target)
    folder.rename(target)
