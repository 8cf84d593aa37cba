"""status.json in a run's folder: what every rank does, for `tools/watch.py`, which may look from another machine.

Rank 0 writes what it knows from the heartbeats. A thread writes the file, so that a file system that hangs delays
neither the training nor the heartbeats; it keeps only the latest content. Nothing reads the file back into a run.
"""

import contextlib
import json
import os
import socket
import threading
import time
from pathlib import Path

NAME = "status.json"
FORMAT = 1
CLOSE_SECONDS = 2.0  # that the last write may take
RUNNING, ENDED, FAILED, HUNG = "running", "ended", "failed", "hung"


def end_killed(folder: Path, problem: str | None):
    """Says "failed" in a run's status.json if its last version is "running"; for a launcher whose ranks have ended."""
    path = folder / NAME
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["state"] != RUNNING or content["host"] != socket.gethostname():  # the first rank's node does it
            return
        content |= {"state": FAILED, "problem": problem, "unix_time": time.time(), "writes": content["writes"] + 1}
        _replace(path, content)
    except (OSError, ValueError, KeyError, TypeError):
        return


def _replace(path: Path, content: dict):
    temporary = path.with_name(f".{NAME}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(content) + "\n", encoding="utf-8")
    os.replace(temporary, path)


class StatusFile:
    """Writes `folder/status.json`, whole files only, if the folder exists. Errors are ignored: the file grows old."""

    def __init__(self, folder: Path, size: int, interval: float, limit: float):
        """
        Args:
            size: ranks of the world.
            interval: seconds between two writes.
            limit: longest time without progress before the run counts as hung.
        """
        self._path = Path(folder) / NAME
        self._head: dict = {"format": FORMAT, "world_size": size, "interval": interval, "limit": limit}
        self._head |= {"host": socket.gethostname(), "pid": os.getpid()}
        self._started, self._writes = time.monotonic(), 0
        self._pending: dict | None = None
        self._closed, self._changed = False, threading.Condition()
        self._thread = threading.Thread(target=self._run, name="status file", daemon=True)
        self._thread.start()

    def post(self, ranks: list[list]):
        """Passes on the newest state of a running run, `Watch.rows` of all ranks; returns at once."""
        self._hand_over(ranks, RUNNING, None, is_last=False)

    def close(self, ranks: list[list], state: str, problem: str | None = None):
        """Passes on the last state, `problem`: why the run is hung, and waits a short time until it is written."""
        self._hand_over(ranks, state, problem, is_last=True)
        self._thread.join(CLOSE_SECONDS)

    def _hand_over(self, ranks: list[list], state: str, problem: str | None, is_last: bool):
        with self._changed:
            if not self._closed:  # another thread may still post while this process ends
                self._pending = {"state": state, "problem": problem, "unix_time": time.time(), "ranks": ranks}
                self._closed = is_last
                self._changed.notify()

    def _run(self):
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending is not None or self._closed)
                content, self._pending = self._pending, None
            if content is None:
                return
            with contextlib.suppress(OSError):
                self._write(content)

    def _write(self, content: dict):
        """Not flushed to the disk, unlike other files of a run: it is of no use after a power failure."""
        if not self._path.parent.is_dir():
            return
        self._writes += 1
        entries = {**self._head, "writes": self._writes, "uptime": time.monotonic() - self._started, **content}
        _replace(self._path, entries)
