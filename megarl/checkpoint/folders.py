"""`DIR/checkpoints/step_%08d/`, each with a manifest; the files `latest` and `best` there name one of them each.

A checkpoint is written under another name, `.writing-step_%08d`, and renamed when every file and the manifest are on
the disk. Both pointers are written after that and changed before a checkpoint is removed. So a run that is killed at
any time leaves them naming complete checkpoints.
"""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from megarl.checkpoint import manifest as manifests
from megarl.errors import WARNED, UsageError, warn
from megarl.mcore.weights import dist_checkpoint
from megarl.observe.files import sync_directory, write_atomically

MANIFEST = manifests.NAME
LATEST, BEST = "latest", "best"
WRITING, REMOVED = ".writing-", ".removed-"  # prefixes of folders that are being written and removed
FROZEN = "frozen"  # folder of the weights that no step changes, and the manifest's entry that names them by role

_damaged: dict[Path, str] = {}  # checkpoints in which this process found damage, with what it is
_warned: set[str] = set()  # warnings that this process has printed
_found: list[list[Path]] = []  # results of `find`, one list for each `recorded` that is open


def step_folder(run: Path, step: int) -> Path:
    """Folder of one step's checkpoint."""
    return Path(run) / "checkpoints" / f"step_{step:08d}"


# -- writing -----------------------------------------------------------------------------------------------------


def writing_folder(run: Path, name: str) -> Path:
    """The folder in which a checkpoint is written until it gets its name."""
    return Path(run) / "checkpoints" / f"{WRITING}{name}"


def make_room(run: Path, name: str):
    """Creates an empty `writing_folder` and removes what a killed run left."""
    writing = writing_folder(run, name)
    writing.parent.mkdir(parents=True, exist_ok=True)
    discard(run)
    writing.mkdir()


def discard(run: Path):
    """Removes half-written checkpoints."""
    for unfinished in (Path(run) / "checkpoints").glob(f"{WRITING}*"):
        shutil.rmtree(unfinished)


def sweep(run: Path):
    """Removes older checkpoints that were renamed for it, also by a run that was killed. May run in a thread."""
    for unfinished in (Path(run) / "checkpoints").glob(f"{REMOVED}*"):
        shutil.rmtree(unfinished, ignore_errors=True)


def commit(run: Path, step: int, entries: dict, files: dict[str, dict]):
    """Makes what was written into the folder of `make_room` the step's checkpoint, then the latest.

    `best` then names the step `entries["best"]["step"]`, this one or an earlier one, if its checkpoint exists.

    Args:
        entries: of the manifest.
        files: `manifest.seal` of every file by name.
    """
    folder = step_folder(run, step)
    writing = writing_folder(run, folder.name)
    manifests.write(writing, {"step": step, **entries, "files": files})
    _replace(writing, folder)
    _point(folder.parent, LATEST, folder)
    best = (entries.get("best") or {}).get("step")
    if best is not None and (step_folder(run, best) / MANIFEST).is_file():
        commit_best(run, best)


def commit_frozen(run: Path, entries: dict, files: dict[str, dict]) -> str:
    """Gives weights that no step changes a name that follows from their content, and returns it.

    Arguments as of `commit`. If the run's folder has the same weights already, these are kept.
    """
    digest = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()[:16]
    writing, folder = writing_folder(run, FROZEN), Path(run) / "checkpoints" / FROZEN / digest
    manifests.write(writing, {**entries, "files": files})
    folder.parent.mkdir(exist_ok=True)
    if folder.exists() and not _is_intact(folder):
        shutil.rmtree(folder)
    if folder.exists():
        shutil.rmtree(writing)
    else:
        writing.rename(folder)
        sync_directory(folder.parent)
    return digest


def _is_intact(folder: Path) -> bool:
    try:
        check(folder, "--save")
    except UsageError:
        return False
    return True


def _replace(writing: Path, folder: Path):
    """Gives a written checkpoint its name; an older one with this name is no longer named by a pointer, then goes."""
    checkpoints = folder.parent
    if folder.exists():
        if named(checkpoints, LATEST) == folder:
            others = [other for other in complete(checkpoints) if other != folder]
            _point(checkpoints, LATEST, others[-1] if others else None)
        if named(checkpoints, BEST) == folder:
            _point(checkpoints, BEST, None)
        remove(folder)
    writing.rename(folder)
    sync_directory(checkpoints)


def restart_from(checkpoints: Path, latest: Path | None, stale: list[Path]):
    """Makes `latest` name a checkpoint, or none, and `best` none of the stale ones: the best before, if it exists."""
    best, before = named(checkpoints, BEST), None
    if best in stale and latest is not None:
        step = (read_manifest(latest, "--load").get("best") or {}).get("step")
        before = None if step is None else step_folder(checkpoints.parent, step)
    _point(checkpoints, LATEST, latest)
    if best in stale:
        _point(checkpoints, BEST, before if before in complete(checkpoints) and before not in stale else None)


def commit_best(run: Path, step: int):
    """Marks a complete checkpoint as the best, then removes those that were kept only as earlier best ones.

    These have `"kept_for": "best"` in their manifests. The latest checkpoint is kept until a later one exists.
    """
    folder = step_folder(run, step)
    if named(folder.parent, BEST) != folder:
        _point(folder.parent, BEST, folder)
    for other in complete(folder.parent):
        if other not in (folder, named(folder.parent, LATEST)) and _kept_for(other) == "best":
            remove(other)


def prune(run: Path, last: int, every: int, used: list[Path]):
    """Gives checkpoints another name that `sweep` removes: all but the newest `last` (0: all are kept), every step that
    `every` divides, and the best.

    Those that `latest` names, that are `used`, or whose manifest cannot be read stay, too.
    """
    if not last:
        return
    checkpoints = Path(run) / "checkpoints"
    kept = {path.resolve() for path in (*complete(checkpoints)[-last:], *used)}
    kept |= {path.resolve() for path in (named(checkpoints, LATEST), named(checkpoints, BEST)) if path}
    for folder in complete(checkpoints):
        if folder.resolve() in kept or not _is_readable(folder) or (every and step_of(folder) % every == 0):
            continue
        remove(folder)


def _is_readable(folder: Path) -> bool:
    try:
        read_manifest(folder, "--save")
    except UsageError:
        return False
    return True


def step_of(path: Path) -> int:
    """The step in a name such as step_00000012 or step_00000012.jsonl; -1 without one."""
    digits = path.name.removeprefix("step_").split(".")[0]
    return int(digits) if digits.isdigit() else -1


def complete(checkpoints: Path) -> list[Path]:
    """The checkpoints of a run that were written to the end, oldest first."""
    return sorted(manifest.parent for manifest in checkpoints.glob(f"step_*/{MANIFEST}"))


def named(checkpoints: Path, pointer: str) -> Path | None:
    """The folder that `latest` or `best` names; None if the pointer does not exist."""
    path = checkpoints / pointer
    return checkpoints / path.read_text(encoding="utf-8").strip() if path.is_file() else None


def _point(checkpoints: Path, pointer: str, folder: Path | None):
    """Makes the pointer `latest` or `best` name a folder; None removes the pointer."""
    if folder is None:
        (checkpoints / pointer).unlink(missing_ok=True)
    else:
        write_atomically(checkpoints / pointer, folder.name + "\n")


def _kept_for(folder: Path) -> str | None:
    """Why a checkpoint was saved ('interval' or 'best'); None if its manifest does not say."""
    try:
        return read_manifest(folder, "--save").get("kept_for")
    except UsageError:
        return None


def remove(folder: Path):
    """Renames a checkpoint for `sweep`, so that no reader sees it half-removed."""
    target = folder.with_name(f"{REMOVED}{folder.name}")
    if target.exists():  # a killed run left it
        shutil.rmtree(target)
    folder.rename(target)


# -- reading -----------------------------------------------------------------------------------------------------


def find(path: str, flag: str) -> Path:
    """The checkpoint folder of a path: a run folder (its latest), a step's folder, or a pointer `latest` or `best`.

    If the latest of a run is damaged, the newest intact one, with a warning. Checks that every file exists and has its
    size; `integrity.find_damage` reads them.

    Raises:
        UsageError: no such checkpoint, or an incomplete or damaged one.
    """
    folder = Path(path)
    try:
        if (folder / "checkpoints").is_dir():
            folder = _newest_intact(folder / "checkpoints", path, flag)
        else:
            if folder.is_file() and folder.name in (LATEST, BEST):
                folder = named(folder.parent, folder.name)
            if not folder.is_dir():
                raise _nothing(path, flag)
            check(folder, flag)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{flag} {path}: cannot be read ({error})") from None
    for found in _found:
        found.append(folder)
    return folder


def _nothing(path: str, flag: str) -> UsageError:
    return UsageError(
        f"{flag} {path}: no such folder; allowed is a run's folder, one of its checkpoints, or checkpoints/best"
    )


def _newest_intact(checkpoints: Path, path: str, flag: str) -> Path:
    """The latest checkpoint of a run; if it cannot be used, the newest one that can."""
    problems: list[str] = []
    try:
        latest = named(checkpoints, LATEST)
    except UnicodeDecodeError:
        latest = None
        problems.append(f"{flag} {checkpoints / LATEST}: is damaged")
    newest_first = complete(checkpoints)[::-1]
    for folder in dict.fromkeys([latest, *newest_first] if latest else newest_first):
        try:
            if not folder.is_dir():
                raise UsageError(f"{flag} {checkpoints / LATEST}: names {folder.name!r}, which does not exist")
            check(folder, flag)
        except UsageError as error:
            problems.append(str(error))
            continue
        _warn(problems, folder)
        return folder
    raise UsageError(problems[0]) if problems else _nothing(path, flag)


def _warn(problems: list[str], used: Path):
    """Warns, once in a run, about checkpoints that cannot be used: a launcher has seen all but those just read."""
    texts = [f"{problem}; {used.name} is used" for problem in problems]
    if os.environ.get("RANK", "0") == "0" and (_damaged or not os.environ.get(WARNED)):
        warn(text for text in texts if text not in _warned)
    _warned.update(texts)


def check(folder: Path, flag: str) -> dict:
    """A checkpoint's manifest; UsageError unless all its files exist with their sizes and no others do."""
    manifest = read_manifest(folder, flag)
    if problem := _damaged.get(folder.resolve()) or manifests.check_sizes(folder, manifest):
        raise UsageError(f"{flag} {folder}: {problem}")
    return manifest


def mark_damaged(folder: Path, problem: str):
    """Makes `find` reject a checkpoint from now on, in this process."""
    _damaged[folder.resolve()] = problem


@contextlib.contextmanager
def recorded() -> Iterator[list[Path]]:
    """Context in which `find` adds the checkpoints that it returns to a list."""
    found: list[Path] = []
    _found.append(found)
    try:
        yield found
    finally:
        _found.remove(found)


def read_manifest(folder: Path, flag: str) -> dict:
    """The manifest that `commit` wrote into a checkpoint; UsageError if it is missing or damaged."""
    return manifests.read(folder, flag)


def frozen_folder(folder: Path, manifest: dict, role: str, flag: str) -> Path:
    """The folder with a role's weights: the checkpoint's, or the one of weights that no step changes.

    Raises:
        UsageError: it was not copied with the checkpoint.
    """
    digest = manifest.get(FROZEN, {}).get(role)
    if digest is None:
        return folder
    candidates = [parent / FROZEN / digest for parent in folder.resolve().parents[:2]]  # the second: of `abandoned-1`
    for candidate in candidates:
        if candidate.is_dir():
            return candidate
    raise UsageError(
        f"{flag} {folder}: the weights of the {role} are in {FROZEN}/{digest} beside it, which is missing; copy it, too"
    )


def source_of(folder: Path, flag: str) -> str:
    """The role whose weights others start from: 'reward' in a checkpoint of train_reward, otherwise 'actor'.

    A converted checkpoint names it.
    """
    manifest = read_manifest(folder, flag)
    return manifest.get("role") or ("reward" if manifest["program"] == "train_reward" else "actor")


def read_shapes(folder: Path, flag: str) -> dict[str, tuple[int, ...]]:
    """Global shapes of a checkpoint's tensors by key; UsageError if its metadata cannot be read."""
    try:
        return dist_checkpoint.tensor_shapes(folder)
    except Exception as error:  # a damaged pickle can raise anything
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise UsageError(f"{flag} {folder}: unreadable checkpoint ({reason})") from None


def check_weights(folder: Path, flag: str, role: str, expected: dict[str, tuple[int, ...] | None]):
    """UsageError unless the checkpoint has weights with these global shapes, by key; None: the key must be absent."""
    shapes = read_shapes(folder, flag)
    for key, shape in expected.items():
        if shape is None:
            if key in shapes:
                raise UsageError(f"{flag} {folder}: has {key}, which the flags of {role} leave out")
            continue
        if key not in shapes:
            raise UsageError(f"{flag} {folder}: has no {key}, which {role} needs")
        if shapes[key] != shape:
            raise UsageError(
                f"{flag} {folder}: {key} has shape {list(shapes[key])}; the flags of {role} describe {list(shape)}"
            )
