"""`DIR/checkpoints/step_%08d/`, each with a manifest; the files `latest` and `best` there name one of them each.

Both pointers are written after a checkpoint is complete and changed before one is removed. So a run that is killed at
any time leaves them naming complete checkpoints.
"""

import json
import shutil
from pathlib import Path

from megarl.errors import UsageError
from megarl.mcore.weights import dist_checkpoint
from megarl.observe.files import write_atomically

MANIFEST = "manifest.json"
LATEST, BEST = "latest", "best"
REMOVED = ".removed-"  # prefix of a folder that is being removed


def step_folder(run: Path, step: int) -> Path:
    """Folder of one step's checkpoint."""
    return Path(run) / "checkpoints" / f"step_{step:08d}"


def commit(run: Path, step: int, manifest: dict):
    """Marks a step's checkpoint as complete, then as the latest, so that readers never find a half-written one.

    `best` then names the step `manifest["best"]["step"]`, this one or an earlier one, if its checkpoint exists.
    """
    folder = step_folder(run, step)
    write_atomically(folder / MANIFEST, json.dumps({"step": step, **manifest}, indent=1, sort_keys=True) + "\n")
    _point(folder.parent, LATEST, folder)
    best = (manifest.get("best") or {}).get("step")
    if best is not None and (step_folder(run, best) / MANIFEST).is_file():
        commit_best(run, best)


def commit_best(run: Path, step: int):
    """Marks a complete checkpoint as the best, then removes those that were kept only as earlier best ones.

    These have `"kept_for": "best"` in their manifests. The latest checkpoint is kept until a later one exists.
    """
    folder = step_folder(run, step)
    if _named(folder.parent, BEST) != folder:
        _point(folder.parent, BEST, folder)
    for other in _complete(folder.parent):
        if other not in (folder, _named(folder.parent, LATEST)) and _kept_for(other) == "best":
            _remove(other)


def make_room(run: Path, step: int):
    """Creates an empty folder for a step's checkpoint and removes an old one, half-written or of an earlier run.

    If `latest` names the old one, it is first changed to the newest other checkpoint; `best` is removed.
    """
    folder = step_folder(run, step)
    folder.parent.mkdir(parents=True, exist_ok=True)
    for unfinished in folder.parent.glob(f"{REMOVED}*"):  # the run was killed while it removed them
        shutil.rmtree(unfinished)
    if _named(folder.parent, LATEST) == folder:
        others = [other for other in _complete(folder.parent) if other != folder]
        _point(folder.parent, LATEST, others[-1] if others else None)
    if _named(folder.parent, BEST) == folder:
        _point(folder.parent, BEST, None)
    if folder.exists():
        _remove(folder)
    folder.mkdir()


def _complete(checkpoints: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    return sorted(manifest.parent for manifest in checkpoints.glob(f"step_*/{MANIFEST}"))


def _named(checkpoints: Path, pointer: str) -> Path | None:
    """The folder that `latest` or `best` names; None if the pointer does not exist."""
    path = checkpoints / pointer
    return checkpoints / path.read_text(encoding="utf-8").strip() if path.is_file() else None


def _point(checkpoints: Path, pointer: str, folder: Path | None):
    """Makes the pointer `latest` or `best` name a folder; None removes the pointer."""
    if folder is None:
        (checkpoints / pointer).unlink()
    else:
        write_atomically(checkpoints / pointer, folder.name + "\n")


def _kept_for(folder: Path) -> str | None:
    """Why a checkpoint was saved ('interval' or 'best'); None if its manifest does not say."""
    try:
        return read_manifest(folder, "--save").get("kept_for")
    except UsageError:
        return None


def _remove(folder: Path):
    """Removes a folder; renamed first, so that no reader sees it half-removed."""
    shutil.rmtree(folder.rename(folder.with_name(f"{REMOVED}{folder.name}")))


def find(path: str, flag: str) -> Path:
    """The checkpoint folder of a path: a run folder (its latest), a step's folder, or a pointer `latest` or `best`.

    Raises:
        UsageError: no such checkpoint, or an incomplete one.
    """
    folder = Path(path)
    try:
        pointer = folder / "checkpoints" / LATEST if folder.is_dir() else folder
        if pointer.is_file() and pointer.name in (LATEST, BEST):
            folder = _named(pointer.parent, pointer.name)
        if not folder.is_dir():
            raise UsageError(
                f"{flag} {path}: no such folder; allowed is a run's folder, one of its checkpoints, or checkpoints/best"
            )
        read_manifest(folder, flag)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{flag} {path}: cannot be read ({error})") from None
    return folder


def read_manifest(folder: Path, flag: str) -> dict:
    """The manifest that `commit` wrote into a checkpoint; UsageError if it is missing or damaged."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"{flag} {folder}: holds no complete checkpoint ({MANIFEST} is missing)") from None
    except ValueError as error:
        raise UsageError(f"{flag} {folder}: {MANIFEST} is damaged ({error})") from None
    if not isinstance(manifest, dict) or not {"step", "world_size", "program"} <= set(manifest):
        raise UsageError(f"{flag} {folder}: {MANIFEST} is damaged (step, world_size or program is missing)")
    return manifest


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


def check_resume(path: str, program: str, train_iters: int, expected: dict[str, dict]) -> Path:
    """The checkpoint to resume from, checked before any work starts.

    Args:
        program: module name of the program; checkpoints of other programs are rejected.
        expected: role -> global shapes of its weights according to the flags, as for `check_weights`.

    Raises:
        UsageError: no readable checkpoint of this program and these models, or no steps left to do.
    """
    folder = find(path, "--load")
    manifest = read_manifest(folder, "--load")
    if manifest["program"] != program:
        raise UsageError(f"--load {path}: was written by {manifest['program']}; {program} resumes only its own runs")
    if manifest["step"] >= train_iters:
        raise UsageError(
            f"--train-iters {train_iters}: the checkpoint of --load {path} is at step {manifest['step']}; "
            "allowed is more"
        )
    for role, shapes in expected.items():
        check_weights(folder, "--load", role, shapes)
    return folder
