"""Arrays that the ranks of a node compute once: the first rank writes them to files, and all ranks map these files.

The ranks wait for each other with file locks, which the kernel releases if their holder dies, so no process group is
needed and no rank waits for one that has crashed. The files are in a folder of the job below `TMPDIR`, which only this
user can read. Mapped files stay readable after `remove`.
"""

import atexit
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from megarl.errors import UsageError, warn

FOLDER = "MEGARL_NODE_FOLDER"  # environment variable: the folder that a launcher made for its ranks and will remove
USERS = "users.lock"  # in a job's folder: every process that uses the folder holds a shared lock
SMALL = 4096  # bytes: smaller files are read; empty ones could not be mapped
_used: dict[tuple[int, Path], int] = {}  # (this process, folder) -> descriptor of its lock


def identity(path: str) -> tuple:
    """What changes when a file, or a file directly in a folder, is replaced or edited; () if it cannot be read."""
    try:
        files = sorted(Path(path).iterdir()) if Path(path).is_dir() else [Path(path)]
        stats = [(str(file.resolve()), file.stat()) for file in files]
    except OSError:
        return ()
    return tuple((name, stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


def arrays(key: Callable[[], tuple], compute: Callable[[], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The arrays by name that `compute` returns, or a UsageError that it raises; one rank of a node calls it.

    Without other ranks on the node, and if the files cannot be written, this process computes them in its own memory.

    `key`: returns what the arrays depend on, as values with a `repr`.
    """
    ranks = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or "1"
    if not os.environ.get(FOLDER) and int(ranks) <= 1:
        return compute()
    try:
        folder = _job_folder() / hashlib.blake2b(repr(key()).encode(), digest_size=16).hexdigest()
    except OSError as error:
        warn([f"{tempfile.gettempdir()}: each rank reads its inputs by itself ({error.strerror or error})"])
        return compute()
    with _locked(folder.with_suffix(".lock")):
        if not folder.exists():
            failed = _compute_into(folder, compute)
            if failed is not None:
                return failed
    return _read(folder)


def text(key: tuple, compute: Callable[[], str]) -> str:
    """As `arrays`, for a text."""
    found = arrays(lambda: key, lambda: {"text": np.frombuffer(compute().encode(), np.uint8)})
    return found["text"].tobytes().decode()


def remove():
    """Leaves the job's files; the last process that does removes them. Also called at exit, as after wrong input."""
    if os.environ.get(FOLDER):
        return  # its launcher removes it
    for folder in _own_folders():
        with contextlib.suppress(OSError), _locked(folder.parent / "folders.lock"):
            os.close(_used.pop((os.getpid(), folder)))
            if not is_in_use(folder):
                shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def folder_for_ranks() -> Iterator[None]:
    """Makes the folder of a job whose ranks this process forks; they find what this process computed before."""
    try:
        folder = _open_folder(f"{os.getpid()}")
    except OSError:  # each rank warns
        yield
        return
    os.environ[FOLDER] = str(folder)
    try:
        yield
    finally:
        del os.environ[FOLDER]
        os.close(_used.pop((os.getpid(), folder)))
        shutil.rmtree(folder, ignore_errors=True)


def _job_folder() -> Path:
    if os.environ.get(FOLDER):
        return Path(os.environ[FOLDER])
    # Without a name or port of the job, the ranks were forked from one process.
    name = os.environ.get("TORCHELASTIC_RUN_ID", "").removeprefix("none")  # torchrun's default is the same for all jobs
    job = name or os.environ.get("MASTER_PORT") or f"fork-{os.getppid()}"
    return _open_folder(f"{job}-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}")


def _open_folder(name: str) -> Path:
    """Makes a folder if needed and locks it; removes folders that killed jobs left behind."""
    base = private_folder(Path(tempfile.gettempdir()) / f"megarl-{os.getuid()}")
    folder = base / name
    if folder not in _own_folders():
        with _locked(base / "folders.lock"):
            folder.mkdir(exist_ok=True)
            _used[os.getpid(), folder] = lock(folder / USERS, fcntl.LOCK_SH)
            atexit.register(remove)
            for other in base.iterdir():
                if other != folder and other.is_dir() and not is_in_use(other):
                    shutil.rmtree(other, ignore_errors=True)
    return folder


def private_folder(base: Path) -> Path:
    """Makes a folder that only this user can read. PermissionError if it is there, and open to others."""
    base.mkdir(mode=0o700, exist_ok=True)
    stat = base.lstat()
    if not base.is_dir() or base.is_symlink() or stat.st_uid != os.getuid() or stat.st_mode & 0o077:
        raise PermissionError(0, f"{base} is open to others")
    return base


def _own_folders() -> list[Path]:
    """Folders that this process has opened; a fork does not count those of its parent."""
    return [folder for process, folder in _used if process == os.getpid()]


def _compute_into(folder: Path, compute: Callable[[], dict[str, np.ndarray]]) -> dict[str, np.ndarray] | None:
    """Writes the arrays, or the error, and renames the folder when it is complete; returns arrays that do not fit."""
    unfinished = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        computed = compute()
    except UsageError as error:
        (unfinished / "error.json").write_text(json.dumps([str(error), error.reporting_rank]))
        unfinished.rename(folder)
        return None
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    try:
        for name, values in computed.items():
            np.save(unfinished / f"{name}.npy", values, allow_pickle=False)
        unfinished.rename(folder)
    except OSError as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        warn([f"{folder.parent}: each rank reads its inputs by itself ({error.strerror or error})"])
        return computed
    return None


def _read(folder: Path) -> dict[str, np.ndarray]:
    if (folder / "error.json").exists():
        raise UsageError(*json.loads((folder / "error.json").read_text()))
    files = {path.stem: (path, path.stat().st_size > SMALL) for path in folder.glob("*.npy")}
    return {
        name: np.load(path, mmap_mode="r" if is_mapped else None, allow_pickle=False)
        for name, (path, is_mapped) in files.items()
    }


def lock(path: Path, kind: int) -> int:
    """Locks a file, which is made if needed, until its descriptor is closed, or this process ends."""
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, kind)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = lock(path, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(descriptor)


def is_in_use(folder: Path) -> bool:
    """Whether a process holds the lock `USERS` of a folder."""
    try:
        os.close(lock(folder / USERS, fcntl.LOCK_EX | fcntl.LOCK_NB))
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False
