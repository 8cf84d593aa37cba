"""`DIR/checkpoints/step_%08d/`, each with a manifest; the files `latest` and `best` there name one of them each.

`commit` writes them, so that they name complete checkpoints at any time.
"""

import contextlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megarl.checkpoint import manifest as manifests
from megarl.comm.load_balance import assign_by_cost
from megarl.errors import WARNED, UsageError, one_line, warn
from megarl.mcore.weights import dist_checkpoint
from megarl.observe.files import step_name, step_of, write_atomically
from megarl.plain_files import is_absent, read_text, resolved

MANIFEST = manifests.NAME
LATEST, BEST = "latest", "best"
MAX_POINTER = 4096  # bytes of these files
FROZEN = "frozen"  # folder of weights that many checkpoints share, and the manifest's entry that names them by role

_damaged: dict[Path, str] = {}  # checkpoints in which this process found damage, with what it is
_warned: set[str] = set()  # warnings that this process has printed
_found: list[list[Path]] = []  # results of `find`, one list for each `recorded` that is open
_in_memory: dict[Path, Path] = {}  # runs of which `find` also looks elsewhere for checkpoints, and where


def step_folder(run: Path, step: int) -> Path:
    """Folder of one step's checkpoint."""
    return Path(run) / "checkpoints" / step_name(step)


def complete(checkpoints: Path) -> list[Path]:
    """The checkpoints of a run that were written to the end, oldest first."""
    return sorted(manifest.parent for manifest in checkpoints.glob(f"step_*/{MANIFEST}"))


def named(checkpoints: Path, pointer: str) -> Path | None:
    """The folder that `latest` or `best` names; None if the pointer does not exist, or is damaged."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return _pointed(checkpoints, pointer)
    return None


def _pointed(checkpoints: Path, pointer: str) -> Path | None:
    """As `named`. OSError or UnicodeDecodeError for a damaged pointer."""
    path = checkpoints / pointer
    if is_absent(path):
        return None
    # Damage may make it a path that leads elsewhere.
    return checkpoints / Path(read_text(path, MAX_POINTER).strip().replace("\0", "") or "nothing").name


def point(checkpoints: Path, pointer: str, folder: Path | None):
    """Makes the pointer `latest` or `best` name a folder; None removes the pointer."""
    if folder is None:
        (checkpoints / pointer).unlink(missing_ok=True)
    else:
        write_atomically(checkpoints / pointer, folder.name + "\n")


def find(path: str, flag: str) -> Path:
    """The checkpoint folder of a path: a run folder (its latest), a step's folder, or a pointer `latest` or `best`.

    If the latest of a run is damaged, the newest intact one, with a warning. UsageError for no such checkpoint, and
    unless every file exists and has its size; `find_damage` reads them.
    """
    folder = Path(path)
    try:
        if (folder / "checkpoints").is_dir() or in_memory(folder):
            folder = _newest_intact(folder / "checkpoints", path, flag)
        else:
            if folder.is_file() and folder.name in (LATEST, BEST):
                folder = _pointed(folder.parent, folder.name)
            if not folder.is_dir():
                raise _nothing(path, flag)
            check(folder, flag)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{flag} {path}: cannot be read ({error})") from None
    for found in _found:
        found.append(folder)
    return folder


def look_also(run: str, checkpoints: Path | None):
    """Makes `find`, in this process, count the checkpoints of another folder as those of a run. None: of no other."""
    _in_memory.pop(resolved(run), None)
    if checkpoints is not None:
        _in_memory[resolved(run)] = checkpoints


def in_memory(run: Path) -> list[Path]:
    """The complete checkpoints of a run in the folder of `look_also`, oldest first; [] without one."""
    checkpoints = _in_memory.get(resolved(run))
    return complete(checkpoints) if checkpoints else []


def is_of_run(checkpoint: Path | None, run: str | Path) -> bool:
    """Whether a checkpoint is one of the run in this folder, on the disk or in memory."""
    if checkpoint is None:
        return False
    places = (Path(run) / "checkpoints", _in_memory.get(resolved(run)))
    return resolved(checkpoint).parent in [resolved(place) for place in places if place is not None]


def _nothing(path: str, flag: str) -> UsageError:
    return UsageError(
        f"{flag} {path}: no such folder; allowed is a run's folder, one of its checkpoints, or checkpoints/best"
    )


def _newest_intact(checkpoints: Path, path: str, flag: str) -> Path:
    """The latest checkpoint of a run; if it cannot be used, the newest one that can."""
    problems: list[str] = []
    try:
        latest = _pointed(checkpoints, LATEST)
    except (OSError, UnicodeDecodeError):
        latest = None
        problems.append(f"{flag} {checkpoints / LATEST}: is damaged")
    newest_first = complete(checkpoints)[::-1]
    candidates = [*dict.fromkeys([latest, *newest_first] if latest else newest_first)]
    for held in in_memory(checkpoints.parent):  # of two of one step it is read sooner
        older = (place for place, folder in enumerate(candidates) if step_of(folder) <= step_of(held))
        candidates.insert(next(older, len(candidates)), held)
    for folder in candidates:
        try:
            if not folder.is_dir():
                raise UsageError(f"{flag} {checkpoints / LATEST}: names {folder.name!r}, which does not exist")
            check(folder, flag)
        except (UsageError, OSError) as error:
            # The name of a folder that a damaged pointer names may be anything.
            problems.append(one_line(str(error) if isinstance(error, UsageError) else f"{flag} {folder}: {error}"))
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


def how_to_resume(run: str) -> str:
    """What continues the run in a folder that was killed, as the end of a line."""
    try:
        found = find(run, "--load")
        step = read_manifest(found, "--load")["step"]
    except UsageError:
        return "; no checkpoint is saved: start the run again"
    where = ", in host memory" if found in in_memory(Path(run)) else ""
    return f" (saved: step {step}{where}); resume with --load {run}"


def read_manifest(folder: Path, flag: str) -> dict:
    """The manifest that `commit` wrote into a checkpoint; UsageError if it is missing or damaged."""
    return manifests.read(folder, flag)


def frozen_folder(folder: Path, manifest: dict, role: str, flag: str) -> Path:
    """The folder with a role's weights: the checkpoint's, or the one of weights that many checkpoints share. UsageError
    if that was not copied with the checkpoint."""
    digest = manifest.get(FROZEN, {}).get(role)
    if digest is None:
        return folder
    for parent in folder.resolve().parents[:2]:  # the second: of `abandoned-1`
        if (found := parent / FROZEN / digest).is_dir():
            return found
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
            stored = {_source_of_key(name) for name in shapes if name.partition(".")[0] == key.partition(".")[0]}
            if stored and _source_of_key(key) not in stored:
                raise UsageError(
                    f"{flag} {folder}: has weights of --model-source {min(stored)}; {role} has {_source_of_key(key)}"
                )
            raise UsageError(f"{flag} {folder}: has no {key}, which {role} needs")
        if shapes[key] != shape:
            raise UsageError(
                f"{flag} {folder}: {key} has shape {list(shapes[key])}; the flags of {role} describe {list(shape)}"
            )


def _source_of_key(key: str) -> str:
    """The `--model-source` of a model with this key: modules of transformers have their names after `hf.`."""
    return "transformers" if ".hf." in key else "megatron"


def find_damage(checkpoints: list[Path], flag: str = "--load") -> dict[Path, str]:
    """{checkpoint: what is wrong with it}, the same on all ranks; a collective of the world.

    The files of frozen weights that a checkpoint names count as its own.
    """
    files = [file for folder in checkpoints for file in _files(folder, flag)]
    files.sort(key=lambda file: -file[3]["size"])
    sizes = torch.tensor([file[3]["size"] for file in files])
    readers = assign_by_cost(sizes, [torch.arange(len(files))], dist.get_world_size())
    mine = [file for file, rank in zip(files, readers.tolist(), strict=True) if rank == dist.get_rank()]
    with ThreadPoolExecutor(max_workers=torch.get_num_threads()) as pool:
        problems = pool.map(lambda file: manifests.check_content(*file[1:]), mine)
        found = [(mine[i][0], problem) for i, problem in enumerate(problems) if problem]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, found)
    return {folder: problem for of_rank in reversed(gathered) for folder, problem in reversed(of_rank)}


def _files(checkpoint: Path, flag: str) -> list[tuple[Path, Path, str, dict]]:
    """(checkpoint, folder, name, manifest entry) of each file."""
    manifest = read_manifest(checkpoint, flag)
    held = {checkpoint: manifest}
    for role in manifest.get(FROZEN, {}):
        with contextlib.suppress(UsageError):  # not copied with the checkpoint: a run that needs it has been rejected
            folder = frozen_folder(checkpoint, manifest, role, flag)
            held[folder] = read_manifest(folder, flag)
    return [(checkpoint, folder, *item) for folder, of in held.items() for item in sorted(of["files"].items())]
