"""Processes that answer requests in confined children: the caller's end (`ask`), and the process's own (`main`).

A warm process for each kind of work has the slow imports and forks for each request, which takes milliseconds. It also
forks itself, for each connection that arrives through the socket DOOR: for other threads, and for ranks that the
launcher forks later, so that one process of a node imports.

Requests and replies are JSON. The process handles nothing but trusted data; what a policy wrote goes to forked children
that confine themselves (`compute_only`). Where the work parses or evaluates it, each request has a child of its own,
and no later one sees what it does to the child; where it only compares text, one child serves many, since a fork takes
longer.
"""

import contextlib
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Hashable
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import NamedTuple, Protocol

from megarl.child_process import Child, parent
from megarl.confine import compute_only

_idle: dict[tuple[int, str], list["_Process"]] = {}  # by process, because a fork must not share its parent's
_doors: dict[str, socket.socket] = {}  # by name: takes connections for which the warm process forks itself
_lock = threading.Lock()


class NoAnswer(Exception):
    """A process has no answer to a request; the message is the whole reason."""


def ask(module: str, name: str, request: dict) -> dict:
    """The answer to a request of the process `python -m module FD DOOR name`, for one thread at a time. The process is
    started with the first request; its main function is `main`. NoAnswer: the process, or this machine, cannot
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


def begin(module: str, name: str):
    """Starts the process that `ask` of this name will use, unless it is there: it imports while this process works."""
    with _lock:
        waiting = _idle.setdefault((os.getpid(), name), [])
        if not waiting:
            waiting.append(_Process(module, name))


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


# -- the process itself, and its children -------------------------------------------------------------------------

_MEMORY = 1 << 30  # bytes of address space that the work may add


class Answers(Protocol):
    """What a process does with its requests. `max_result`: bytes that a child may report."""

    max_result: int

    def warm_up(self):
        """Imports what all requests need."""

    def work(self, item: dict) -> dict:
        """The result of an item; runs confined. Both are JSON."""

    def checked(self, result: dict) -> dict:
        """A child's result, reduced to what it may hold: the child is in the hands of what it read. May raise."""

    def answer(self, request: dict, children: "Children") -> dict:
        """The answer to a request, with `problem` if there is none."""


def main(load: Callable[[str], Answers]):
    """Serve until the connection ends. Arguments: file descriptors of connection and door, the name to `load`."""
    connection = parent(dies_with_thread=False)  # any thread of the caller may use a process that another one started
    door, answers = socket.socket(fileno=int(sys.argv[2])), load(sys.argv[3])
    os.set_inheritable(door.fileno(), False)
    problem = compute_only.works()
    if problem is None:
        answers.warm_up()
    _serve_caller(answers, problem, connection, door)


def _serve_caller(answers: Answers, problem: str | None, connection: Connection, door: socket.socket | None):
    """Answers requests until the connection ends, and forks for each connection that arrives at the door. `problem`:
    why this machine cannot confine a process; the first message of the connection.
    """
    children, forks = Children(answers, connection.fileno()), []
    with contextlib.suppress(EOFError, ConnectionError):
        connection.send_bytes(json.dumps({"problem": problem}).encode())
        while True:
            ready = wait([connection] if door is None else [connection, door])
            if door in ready:
                _, descriptors, _, _ = socket.recv_fds(door, 16, 1)
                forks = [fork for fork in forks if not os.waitpid(fork, os.WNOHANG)[0]]
                forks += [_fork(answers, problem, descriptor, (connection, door)) for descriptor in descriptors]
            if connection not in ready:
                continue
            request = json.loads(connection.recv_bytes())
            try:
                answer = answers.answer(request, children)
            except Exception as error:
                answer = {"problem": f"{type(error).__name__}: {error}"}
            connection.send_bytes(json.dumps(answer).encode())


def _fork(answers: Answers, problem: str | None, descriptor: int, inherited: tuple) -> int:
    """Forks a process that serves the connection of a descriptor, without the connections of this one; its number."""
    child = os.fork()
    if child:
        os.close(descriptor)
        return child
    try:
        os.setsid()  # the caller of this process may kill its group
        for other in inherited:
            other.close()
        _serve_caller(answers, problem, Connection(descriptor), None)
    finally:
        os._exit(0)


class _Child(NamedTuple):
    """A confined child, which works on items that come through its socket."""

    pid: int
    connection: socket.socket
    inherits: Hashable = None

    def end(self) -> int:
        """Kills it; returns its exit status."""
        os.kill(self.pid, signal.SIGKILL)
        status = os.waitpid(self.pid, 0)[1]
        self.connection.close()
        return os.waitstatus_to_exitcode(status)


class Children:
    """Works on items in confined children of this process."""

    def __init__(self, answers: Answers, caller: int):
        """`caller`: file descriptor whose hang-up ends this process."""
        self._answers, self._caller = answers, caller
        self._shared: _Child | None = None  # works on items whose text is only compared

    def in_own_child(self, item: dict, seconds: float) -> dict:
        """The checked result, or {"problem": why there is none}, with "late" if the time was up."""
        child = self._start(seconds)
        try:
            content = self._ask(child, item, seconds)
        finally:
            status = child.end()
        return result_of(content, seconds, f"the process that scored it ended with status {status}", self._answers)

    def in_shared_child(self, item: dict, seconds: float, inherits: Hashable) -> dict:
        """As `in_own_child`. The child is replaced after a failure, and when there is more to inherit (another key)."""
        if self._shared is None or self._shared.inherits != inherits:
            self.end_shared_child()
            self._shared = self._start(None, inherits)
        content = self._ask(self._shared, item, seconds)
        result = result_of(content, seconds, "the process that scored it ended", self._answers)
        if "problem" in result:
            self.end_shared_child()
        return result

    def end_shared_child(self):
        """Kills it, if there is one."""
        if self._shared is not None:
            self._shared.end()
            self._shared = None

    def _start(self, seconds: float | None, inherits: Hashable = None) -> _Child:
        """`seconds`: of processor time; None: any."""
        ours, theirs = socket.socketpair()
        if (child := os.fork()) == 0:
            try:
                compute_only.confine(theirs.fileno(), seconds, _MEMORY)
                for line in os.fdopen(theirs.fileno(), "rb", closefd=False):
                    self._report(json.loads(line), theirs.fileno())
            finally:
                os._exit(0)
        theirs.close()
        return _Child(child, ours, inherits)

    def _ask(self, child: _Child, item: dict, seconds: float) -> bytes | None:
        """The line that a child writes about an item, or its part before the child ended; None at the limit."""
        content, deadline = bytearray(), time.monotonic() + seconds
        events = select.poll()
        events.register(child.connection, select.POLLIN)
        events.register(self._caller, 0)  # only its hang-up
        with contextlib.suppress(OSError):
            child.connection.sendall(json.dumps(item).encode() + b"\n")
            while len(content) < self._answers.max_result and not content.endswith(b"\n"):
                ready = dict(events.poll(max(0.0, (deadline - time.monotonic()) * 1000)))
                if self._caller in ready:
                    os._exit(0)
                if not ready:
                    return None
                chunk = child.connection.recv(1 << 16)
                if not chunk:
                    break
                content += chunk
        return bytes(content)

    def _report(self, item: dict, report: int):
        try:
            result = self._answers.work(item)
        except Exception as error:
            result = {"problem": f"{type(error).__name__}: {error}"[:1000]}
        content = json.dumps(result).encode() + b"\n"
        while content:
            content = content[os.write(report, content) :]


def result_of(content: bytes | None, seconds: float, ended: str, answers: Answers) -> dict:
    """The result that a child has written, or why there is none: it took too long, or has `ended`."""
    if content is None:
        return {"problem": f"no result within {seconds:g} s", "late": True}
    try:
        result = json.loads(content)
        return {"problem": str(result["problem"])} if "problem" in result else answers.checked(result)
    except (ValueError, TypeError, KeyError, RecursionError):
        return {"problem": ended}
