"""run.lock in a run's folder: one run at a time writes there, also if the folder is on a network file system.

A job that is queued again may start while the one before still drains. The lock names its owner; a thread of rank 0
renews it. A lock is void if its owner is on this machine and has ended, or if it was not renewed for `STALE` seconds by
the file system's clock: clocks of machines may differ.
"""

import atexit
import contextlib
import json
import os
import socket
import threading
import time
import uuid
from pathlib import Path
from typing import Any

from megarl.errors import RunStopped, UsageError, warn
from megarl.plain_files import MAX_WRITTEN, read_json

NAME = "run.lock"
RENEWED = 5.0  # seconds between two renewals
STALE = 60.0  # seconds without one after which a lock of another machine is void


_held: "RunLock | None" = None  # of this process


def take(folder: str | None):
    """Takes the lock of a run's folder, on rank 0; None: the run has none. UsageError if another run holds it."""
    global _held
    if folder and os.environ.get("RANK", "0") == "0":
        _held = RunLock(Path(folder))


def check():
    """RunStopped if another run has taken the lock that this process took."""
    if _held is not None:
        _held.check()


def release():
    """Gives the lock of this process free, if it has one."""
    global _held
    if _held is not None:
        _held.release()
        _held = None


class RunLock:
    """The lock of a run's folder, held by rank 0 of the run."""

    def __init__(self, folder: Path):
        """Takes the lock of the folder of `--save`, which is made if it does not exist.

        Raises:
            UsageError: another run holds the lock. Nothing in the folder was changed.
        """
        self._path, self._where, self._token = Path(folder) / NAME, f"--save {folder}", uuid.uuid4().hex
        self._ended = threading.Event()
        self._made = [place for place in (self._path.parent, *self._path.parent.parents) if not place.exists()]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        while not self._is_taken():
            self._remove_void()
        self._thread = threading.Thread(target=self._renew, name="run lock", daemon=True)
        self._thread.start()
        atexit.register(self.release)

    def check(self):
        """RunStopped if another run has taken the folder, because this one could not renew its lock for too long."""
        if (owner := _read(self._path)) and owner.get("token") != self._token:
            raise RunStopped(f"{self._where}: {_described(owner)} has taken the folder; this run must not write there")

    def release(self):
        """Gives the folder free, once. Folders that the lock made, and in which nothing was written, go with it."""
        if not self._ended.is_set():
            self._ended.set()
            self._thread.join(RENEWED)
            if (_read(self._path) or {}).get("token") == self._token:
                self._path.unlink(missing_ok=True)
                with contextlib.suppress(OSError):  # the first that is not empty
                    for place in self._made:
                        place.rmdir()

    def _is_taken(self) -> bool:
        """Makes the lock file, if there is none. The file has its content from the first moment on."""
        own = self._path.with_name(f".{NAME}.{self._token}")
        own.write_text(json.dumps(_this_process() | {"token": self._token}))
        try:
            os.link(own, self._path)  # fails if the file exists, on every file system
            return True
        except FileExistsError:
            return False
        except OSError:  # a file system without links
            with contextlib.suppress(FileExistsError), self._path.open("x") as file:
                file.write(own.read_text())
                return True
            return False
        finally:
            own.unlink(missing_ok=True)

    def _remove_void(self):
        """Removes the lock if its owner is gone; waits until that is known. UsageError if the owner lives."""
        owner, renewed = _read(self._path), self._age()
        if owner is None or renewed is None:
            return  # it was released
        is_here = {name: owner.get(name) for name in ("host", "boot", "space")} == _this_machine()
        if is_here and _lives(owner):
            raise self._held(owner)
        if not is_here and renewed < STALE:
            warn([f"{self._where}: {_described(owner)} wrote here {renewed:.0f} s ago; waiting for it to end"])
            while (age := self._age()) is not None and age < STALE:
                if age < renewed:  # it was renewed
                    raise self._held(owner)
                renewed = age
                time.sleep(1.0)
        if (_read(self._path) or {}).get("token") == owner.get("token"):
            self._path.unlink(missing_ok=True)

    def _held(self, owner: dict[str, Any]) -> UsageError:
        return UsageError(
            f"{self._where}: {_described(owner)} writes there; wait for its end, or choose another folder"
        )

    def _age(self) -> float | None:
        """Seconds since the lock was renewed, by the clock of its file system; None if there is no lock."""
        probe = self._path.with_name(f".{NAME}.{self._token}.now")
        try:
            probe.touch()
            return probe.stat().st_mtime - self._path.stat().st_mtime
        except FileNotFoundError:
            return None
        finally:
            probe.unlink(missing_ok=True)

    def _renew(self):
        while not self._ended.wait(RENEWED):
            with contextlib.suppress(OSError):
                if (_read(self._path) or {}).get("token") == self._token:
                    os.utime(self._path)


def _read(path: Path) -> dict[str, Any] | None:
    """The owner of a lock; None if there is no lock, and {} if the file is damaged."""
    try:
        owner = read_json(path, MAX_WRITTEN)
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError, OSError):
        return {}
    return owner if isinstance(owner, dict) else {}


def _this_machine() -> dict[str, Any]:
    """What tells machines, and containers with process numbers of their own, apart."""
    boot, space = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    return {
        "host": socket.gethostname(),
        "boot": boot.read_text().strip() if boot.exists() else None,
        "space": space.stat().st_ino if space.exists() else None,
    }


def _this_process() -> dict[str, Any]:
    job = os.environ.get("SLURM_JOB_ID")
    return _this_machine() | {"pid": os.getpid(), "started": _start_of(os.getpid()), "job": job}


def _start_of(pid: int) -> str | None:
    """When a process started, in the kernel's ticks; None if it does not run. Numbers of processes are used again."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def _lives(owner: dict[str, Any]) -> bool:
    """Whether the owner on this machine still runs; a process may take its own lock again."""
    pid = owner.get("pid")
    return type(pid) is int and pid != os.getpid() and owner.get("started") == _start_of(pid) is not None


def _described(owner: dict[str, Any]) -> str:
    job = f"job {owner['job']}, " if owner.get("job") else ""
    return f"another run ({job}process {owner.get('pid')} on {owner.get('host')})".replace("\n", " ")
