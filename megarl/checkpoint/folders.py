"""`DIR/checkpoints/step_%08d/` with a manifest, and `DIR/checkpoints/latest`, which is written last."""

import json
from pathlib import Path

from megarl.errors import UsageError
from megarl.mcore import checkpoint
from megarl.observe.files import write_atomically

MANIFEST = "manifest.json"
LATEST = "latest"


def step_folder(run: Path, step: int) -> Path:
    """Folder of one step's checkpoint."""
    return Path(run) / "checkpoints" / f"step_{step:08d}"


def commit(run: Path, step: int, manifest: dict):
    """Marks a step's folder as complete, then as the latest: a reader never meets a half-written one."""
    folder = step_folder(run, step)
    write_atomically(folder / MANIFEST, json.dumps({"step": step, **manifest}, indent=1, sort_keys=True) + "\n")
    write_atomically(folder.parent / LATEST, folder.name + "\n")


def find(path: str, flag: str) -> Path:
    """The checkpoint that a run folder (its latest) or a step's folder means.

    Raises:
        UsageError: there is none, or it was not completed.
    """
    folder = Path(path)
    latest = folder / "checkpoints" / LATEST
    try:
        if latest.is_file():
            folder = latest.parent / latest.read_text(encoding="utf-8").strip()
        if not folder.is_dir():
            raise UsageError(f"{flag} {path}: no such folder; allowed is a run's folder or one of its checkpoints")
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


def read_shapes(folder: Path, flag: str) -> dict[str, tuple[int, ...]]:
    """Global shapes of a checkpoint's tensors; UsageError when its metadata cannot be read."""
    try:
        return checkpoint.tensor_shapes(folder)
    except Exception as error:  # a damaged pickle can raise anything
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise UsageError(f"{flag} {folder}: unreadable checkpoint ({reason})") from None


def check_weights(folder: Path, flag: str, role: str, expected: dict[str, tuple[int, ...]]):
    """UsageError unless the checkpoint holds the policy's weights in these global shapes (by key)."""
    shapes = read_shapes(folder, flag)
    for key, shape in expected.items():
        if key not in shapes:
            raise UsageError(f"{flag} {folder}: has no {key}, which {role} needs")
        if shapes[key] != shape:
            raise UsageError(
                f"{flag} {folder}: {key} has shape {list(shapes[key])}; the flags of {role} describe {list(shape)}"
            )


def check_resume(path: str, program: str, train_iters: int, expected: dict[str, dict[str, tuple[int, ...]]]) -> Path:
    """The checkpoint to resume from, checked before any work starts.

    Args:
        program: the module that resumes; a checkpoint of another one lacks what it needs.
        expected: role -> global shapes of the weights that its flags describe.

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
