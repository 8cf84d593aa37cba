"""`DIR/checkpoints/step_%08d/` with a manifest; `latest` and `best` beside them name one each and are written last.

A run that is killed at any instant leaves both naming complete checkpoints: what is removed loses its name first.
"""

import json
import shutil
from pathlib import Path

from megarl.errors import UsageError
from megarl.mcore.weights import dist_checkpoint
from megarl.observe.files import write_atomically

MANIFEST = "manifest.json"
LATEST, BEST = "latest", "best"
REMOVED = ".removed-"  # in front of the name of a folder that is being removed


def step_folder(run: Path, step: int) -> Path:
    """Folder of one step's checkpoint."""
    return Path(run) / "checkpoints" / f"step_{step:08d}"


def commit(run: Path, step: int, manifest: dict):
    """Marks a step's folder as complete, then as the latest: a reader never meets a half-written one.

    `best` then names the step of `manifest["best"]["step"]`, this one or an earlier one, if that was saved here.
    """
    folder = step_folder(run, step)
    write_atomically(folder / MANIFEST, json.dumps({"step": step, **manifest}, indent=1, sort_keys=True) + "\n")
    _point(folder.parent, LATEST, folder)
    best = (manifest.get("best") or {}).get("step")
    if best is not None and (step_folder(run, best) / MANIFEST).is_file():
        commit_best(run, best)


def commit_best(run: Path, step: int):
    """Marks a complete checkpoint as the best, then removes those that were kept for having been it.

    These say `"kept_for": "best"` in their manifests; the one that `latest` names stays until there is a later one.
    """
    folder = step_folder(run, step)
    if _named(folder.parent, BEST) != folder:
        _point(folder.parent, BEST, folder)
    for other in _complete(folder.parent):
        if other not in (folder, _named(folder.parent, LATEST)) and _kept_for(other) == "best":
            _remove(other)


def make_room(run: Path, step: int):
    """An empty folder for a step's checkpoint, in the place of one that is there: half-written, or of an earlier run.

    Before a complete one goes, `latest` names the newest of the others, and `best`, which has no second, nothing.
    """
    folder = step_folder(run, step)
    folder.parent.mkdir(parents=True, exist_ok=True)
    for remains in folder.parent.glob(f"{REMOVED}*"):  # of a run that was killed while it removed them
        shutil.rmtree(remains)
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
    """The folder that `latest` or `best` names; None without such a file."""
    path = checkpoints / pointer
    return checkpoints / path.read_text(encoding="utf-8").strip() if path.is_file() else None


def _point(checkpoints: Path, pointer: str, folder: Path | None):
    """Makes `latest` or `best` name a folder, or nothing."""
    if folder is None:
        (checkpoints / pointer).unlink()
    else:
        write_atomically(checkpoints / pointer, folder.name + "\n")


def _kept_for(folder: Path) -> str | None:
    """What a checkpoint was saved for; None where its manifest does not say."""
    try:
        return read_manifest(folder, "--save").get("kept_for")
    except UsageError:
        return None


def _remove(folder: Path):
    """Removes a folder, of which nobody ever sees a part."""
    shutil.rmtree(folder.rename(folder.with_name(f"{REMOVED}{folder.name}")))


def find(path: str, flag: str) -> Path:
    """The checkpoint that a run folder (its latest), a step's folder, or a file `latest` or `best` means.

    Raises:
        UsageError: there is none, or it was not completed.
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
    """What `commit` wrote into a checkpoint's folder; UsageError when it is missing or damaged."""
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
    """The role whose model others start from: the reward model in a run of train_reward, the policy in any other."""
    return "reward" if read_manifest(folder, flag)["program"] == "train_reward" else "actor"


def read_shapes(folder: Path, flag: str) -> dict[str, tuple[int, ...]]:
    """Global shapes of a checkpoint's tensors; UsageError when its metadata cannot be read."""
    try:
        return dist_checkpoint.tensor_shapes(folder)
    except Exception as error:  # a damaged pickle can raise anything
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise UsageError(f"{flag} {folder}: unreadable checkpoint ({reason})") from None


def check_weights(folder: Path, flag: str, role: str, expected: dict[str, tuple[int, ...] | None]):
    """UsageError unless the checkpoint holds a model's weights in these global shapes (by key; None: not at all)."""
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
        program: the module that resumes; a checkpoint of another one lacks what it needs.
        expected: role -> global shapes of the weights that its flags describe, as for `check_weights`.

    Raises:
        UsageError: no readable checkpoint of this program and these models, or nothing left to do.
    """
    folder = find(path, "--load")
    manifest = read_manifest(folder, "--load")
    if manifest["program"] != program:
        raise UsageError(f"--load {path}: was written by {manifest['program']}; {program} resumes its own runs alone")
    if manifest["step"] >= train_iters:
        raise UsageError(
            f"--train-iters {train_iters}: the checkpoint of --load {path} is at step {manifest['step']}; "
            "allowed is more"
        )
    for role, shapes in expected.items():
        check_weights(folder, "--load", role, shapes)
    return folder
