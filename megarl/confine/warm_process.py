"""The caller's end of processes that answer requests in confined children (`children`).

A warm process for each kind of work has the slow imports and forks for each request, which takes milliseconds. It also
forks itself for other threads and for ranks that the launcher forks later, so that one process of a node imports.
"""

import contextlib
import json
import os
import socket
import threading
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from megarl.child_process import Child

_idle: dict[tuple[int, str], list["_Process"]] = {}  # by process, because a fork must not share its parent's
_doors: dict[str, socket.socket] = {}  # by name: takes connections for which the warm process forks itself
_lock = threading.Lock()


class NoAnswer(Exception):
    """A process has no answer to a request; the message is the whole reason."""


def ask(module: str, name: str, request: dict) -> dict:
    """The answer to a request of the process `python -m module FD DOOR name`, for one thread at a time. The process is
    started with the first request; its main function is `children.main`. NoAnswer: the process, or this machine, cannot
    do the work.
    """
    key = (os.getpid(), name)
    with _lock:
        waiting = _idle.setdefault(key, [])
        process = waiting.pop() if waiting else _Process(module, name)
    try:
        reply = process.ask(request)
    except BaseException:
        process.end()
        raise
    with _lock:
        waiting.append(process)
    if reply.get("problem") is not None:
        raise NoAnswer(reply["problem"])
    return reply


class _Process:
    """A process that works for one thread at a time; it ends with its connection, so when this process does.

    `process`: the warm process, if this object has started it; None: a fork of a warm process.
    """

    def __init__(self, module: str, name: str):
        self.process: Child | None = None
        self._is_ready = False
        self.connection = _connect(name)
        if self.connection is None:
            self.process, _doors[name] = _start(module, name)
            self.connection = self.process.connection

    def ask(self, request: dict) -> dict:
        if not self._is_ready:  # it may still be importing
            problem = self._reply()["problem"]
            if problem is not None:
                raise NoAnswer(f"this machine cannot confine a process: {problem}")
            self._is_ready = True
        self.connection.send_bytes(json.dumps(request).encode())
        return self._reply()

    def _reply(self) -> dict:
        try:
            return json.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            status = f" with status {self.process.status()}" if self.process else ""
            raise NoAnswer(f"its process ended{status}") from None

    def end(self):
        self.connection.close()
        if self.process is not None:
            self.process.end()


def _connect(name: str) -> Connection | None:
    """A connection to a fork of the warm process of that name; None if there is no such process."""
    door = _doors.get(name)
    if door is None:
        return None
    ours, theirs = Pipe()
    with theirs, contextlib.suppress(OSError):  # the process has ended
        socket.send_fds(door, [b"fork"], [theirs.fileno()])
        return ours
    ours.close()
    return None


def _start(module: str, name: str) -> tuple[Child, socket.socket]:
    environment = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
    environment["LANG"] = "C.UTF-8"
    # Sets in the same order each time; no threads, which a fork would not have.
    environment |= {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with theirs:
        child = Child(module, str(theirs.fileno()), name, environment=environment, descriptors=(theirs.fileno(),))
    return child, ours
