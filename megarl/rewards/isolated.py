"""Verifiers that parse or evaluate responses: each response is scored in a confined process of its own.

A warm process per verifier (`scorer.py`) has the slow imports and forks for each sample, which takes milliseconds. It
also forks itself for other threads and for ranks that the launcher forks later, so that one process of a node imports.
"""

import contextlib
import json
import os
import socket
import threading
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from megarl.child_process import Child
from megarl.rewards.base import Sample, Score, ScoringError

_idle: dict[tuple[int, str], list["_Scorer"]] = {}  # by process, because a fork must not share its parent's
_doors: dict[str, socket.socket] = {}  # by verifier: takes connections for which its warm process forks itself
_lock = threading.Lock()


class Isolated:
    """The verifier `name`, called for one sample at a time by each thread; `seconds` limit a sample.

    A response with which scoring takes too long, raises, or kills its process is a wrong answer, unless the reference
    answer fares no better: then the verifier has failed, and ScoringError says why.
    """

    def __init__(self, name: str, seconds: float):
        self._name, self._seconds = name, seconds

    def __call__(self, sample: Sample) -> Score:
        fields = {name: getattr(sample, name) for name in ("prompt", "response", "answer", "metadata", "finished")}
        return Score(**self._ask({"sample": fields, "seconds": self._seconds})["score"])

    def prepare(self, metadata: dict):
        """ScoringError if samples with such metadata cannot be scored."""
        self._ask({"sample": None, "metadata": metadata})

    def _ask(self, request: dict) -> dict:
        key = (os.getpid(), self._name)
        with _lock:
            waiting = _idle.setdefault(key, [])
            scorer = waiting.pop() if waiting else _Scorer(self._name)
        try:
            reply = scorer.ask(request)
        except BaseException:
            scorer.end()
            raise
        with _lock:
            waiting.append(scorer)
        if reply.get("problem") is not None:
            raise ScoringError(reply["problem"])
        return reply


class _Scorer:
    """A process that scores for one thread at a time; it ends with its connection, so when this process does.

    `process`: the warm process, if this object has started it; None: a fork of a warm process.
    """

    def __init__(self, name: str):
        self.process: Child | None = None
        self._is_ready = False
        self.connection = _connect(name)
        if self.connection is None:
            self.process, _doors[name] = _start(name)
            self.connection = self.process.connection

    def ask(self, request: dict) -> dict:
        if not self._is_ready:  # it may still be importing
            problem = self._reply()["problem"]
            if problem is not None:
                raise ScoringError(f"this machine cannot confine a process: {problem}")
            self._is_ready = True
        self.connection.send_bytes(json.dumps(request).encode())
        return self._reply()

    def _reply(self) -> dict:
        try:
            return json.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            status = f" with status {self.process.status()}" if self.process else ""
            raise ScoringError(f"its process ended{status}") from None

    def end(self):
        """Ends the process; forks that score for others go on."""
        self.connection.close()
        if self.process is not None:
            self.process.end()


def _connect(name: str) -> Connection | None:
    """A connection to a fork of the verifier's warm process; None if there is no such process."""
    door = _doors.get(name)
    if door is None:
        return None
    ours, theirs = Pipe()
    with theirs, contextlib.suppress(OSError):  # the process has ended
        socket.send_fds(door, [b"fork"], [theirs.fileno()])
        return ours
    ours.close()
    return None


def _start(name: str) -> tuple[Child, socket.socket]:
    """Starts the warm process of a verifier; returns it with its door."""
    environment = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
    environment["LANG"] = "C.UTF-8"
    # Sets in the same order each time; no threads, which a fork would not have.
    environment |= {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with theirs:
        arguments = str(theirs.fileno()), name
        child = Child("megarl.rewards.scorer", *arguments, environment=environment, descriptors=(theirs.fileno(),))
    return child, ours
