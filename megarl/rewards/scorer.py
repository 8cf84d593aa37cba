"""The process of `isolated.py`: `python -m megarl.rewards.scorer FD DOOR NAME`, which scores with the verifier NAME.

Requests and replies are JSON on the parent's connection. This process itself handles nothing but the prompts' own data;
responses are scored by forked children that confine themselves (`compute_only`). Where a verifier
parses or evaluates a response, each has a child of its own: what a response does to the child ends with it, and no
later sample sees it. Where a verifier only compares text, one child serves many responses: a fork takes longer.

For each connection that arrives through the socket DOOR this process forks itself; the fork serves that connection.
"""

import contextlib
import json
import os
import select
import signal
import socket
import sys
import time
from dataclasses import asdict, replace
from multiprocessing.connection import Connection, wait

from megarl.child_process import parent
from megarl.measurements import parts_of, value_of
from megarl.rewards import compute_only
from megarl.rewards.base import Sample, Score, reference_sample

_MEMORY = 1 << 30  # bytes of address space that scoring may add
_MAX_RESULT = 1 << 22  # bytes; a response's answer is part of it


def main():
    """Serve until the connection ends."""
    connection = parent(dies_with_thread=False)  # any thread of the caller may use a scorer that another one started
    door, module = socket.socket(fileno=int(sys.argv[2])), _module(sys.argv[3])
    os.set_inheritable(door.fileno(), False)
    problem = compute_only.works()
    if problem is None:
        module.warm_up()
    _serve_caller(module, problem, connection, door)


def _serve_caller(module, problem: str | None, connection: Connection, door: socket.socket | None):
    """Answers requests until the connection ends, and forks for each connection that arrives at the door.

    Args:
        problem: why this machine cannot confine a process; the first message of the connection.
    """
    scorer, forks = Scorer(module, connection.fileno()), []
    with contextlib.suppress(EOFError, ConnectionError):
        connection.send_bytes(json.dumps({"problem": problem}).encode())
        while True:
            ready = wait([connection] if door is None else [connection, door])
            if door in ready:
                _, descriptors, _, _ = socket.recv_fds(door, 16, 1)
                forks = [fork for fork in forks if not os.waitpid(fork, os.WNOHANG)[0]]
                forks += [_fork(module, problem, descriptor, (connection, door)) for descriptor in descriptors]
            if connection not in ready:
                continue
            request = json.loads(connection.recv_bytes())
            try:
                answer = scorer.answer(request)
            except Exception as error:
                answer = {"problem": f"{type(error).__name__}: {error}"}
            connection.send_bytes(json.dumps(answer).encode())


def _fork(module, problem: str | None, descriptor: int, inherited: tuple) -> int:
    """Forks a process that serves the connection of a descriptor, without the connections of this one; its number."""
    child = os.fork()
    if child:
        os.close(descriptor)
        return child
    try:
        os.setsid()  # the caller of this process may kill its group
        for other in inherited:
            other.close()
        _serve_caller(module, problem, Connection(descriptor), None)
    finally:
        os._exit(0)


def _module(name: str):
    """`score_inside(sample)` scores in the child; `prepare(metadata)` runs before the fork, without the response.

    `may_share(metadata)`: whether the verifier only compares the response's text; `prepared()` changes with what the
    children inherit.
    """
    if name == "math-verify":
        from megarl.rewards import mathematics

        return mathematics
    from megarl.rewards import tasks

    return tasks


class Scorer:
    """Scores with the functions of a verifier's module, in children of this process."""

    def __init__(self, module, caller: int):
        """`caller`: file descriptor whose hang-up ends this process."""
        self._module, self._caller = module, caller
        # The child that scores responses of which the verifier only compares the text, and what it has inherited.
        self._shared: tuple[int, socket.socket, object] | None = None

    def answer(self, request: dict) -> dict:
        """{"score": fields of a Score}, or {"problem": why the verifier has failed}; of a preparation the latter."""
        if request["sample"] is None:
            self._module.prepare(request["metadata"])
            return {"problem": None}
        sample, seconds = Sample(**request["sample"]), request["seconds"]
        self._module.prepare(sample.metadata)
        run = self._in_shared_child if self._module.may_share(sample.metadata) else self._in_own_child
        result = run(sample, seconds)
        if "score" in result:
            return result
        # Is it the response's fault? Not if the reference answer fares no better.
        reference = run(reference_sample(sample), seconds)
        if "score" not in reference:
            return reference
        wrong = replace(self._module.WRONG, extracted=None, timed_out="late" in result)
        return {"score": asdict(wrong)}

    def _in_own_child(self, sample: Sample, seconds: float) -> dict:
        """{"score": fields of a Score}, or {"problem": why there is none}, with "late" if the time was up."""
        result, report = os.pipe()
        child = os.fork()
        if child == 0:
            _score(self._module, sample, seconds, report)
        os.close(report)
        try:
            content = self._read(result, seconds)
        finally:
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            os.close(result)
        status = os.waitstatus_to_exitcode(status)
        return _result(content, seconds, f"the process that scored it ended with status {status}")

    def _in_shared_child(self, sample: Sample, seconds: float) -> dict:
        """As `_in_own_child`. The child is replaced after a failure, and when there is more to inherit."""
        if self._shared is None or self._shared[2] != self._module.prepared():
            self.end_shared_child()
            self._start_shared_child()
        _, connection, _ = self._shared
        try:
            connection.sendall(json.dumps(asdict(sample)).encode() + b"\n")
            content = self._read(connection.fileno(), seconds, b"\n")
        except OSError:
            content = b""
        result = _result(content, seconds, "the process that scored it ended")
        if "score" not in result:
            self.end_shared_child()
        return result

    def _start_shared_child(self):
        ours, theirs = socket.socketpair()
        prepared, child = self._module.prepared(), os.fork()
        if child == 0:
            _serve(self._module, theirs.fileno())
        theirs.close()
        self._shared = child, ours, prepared

    def end_shared_child(self):
        """Kills it, if there is one."""
        if self._shared is not None:
            child, connection, _ = self._shared
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            connection.close()
            self._shared = None

    def _read(self, stream: int, seconds: float, end: bytes | None = None) -> bytes | None:
        """What a child writes until `end`, or until it closes the stream; None at the limit."""
        content, deadline = bytearray(), time.monotonic() + seconds
        events = select.poll()
        events.register(stream, select.POLLIN)
        events.register(self._caller, 0)  # only its hang-up
        while len(content) < _MAX_RESULT:
            ready = dict(events.poll(max(0.0, (deadline - time.monotonic()) * 1000)))
            if self._caller in ready:
                os._exit(0)
            if not ready:
                return None
            chunk = os.read(stream, 1 << 16)
            if not chunk:
                break
            content += chunk
            if end is not None and content.endswith(end):
                break
        return bytes(content)


def _serve(module, connection: int):
    """The shared child; never returns."""
    try:
        compute_only.confine(connection, None, _MEMORY)
        requests = os.fdopen(connection, "rb", closefd=False)
        for line in requests:
            _report(module, Sample(**json.loads(line)), connection)
    finally:
        os._exit(0)


def _score(module, sample: Sample, seconds: float, report: int):
    """The child of one response; never returns."""
    try:
        compute_only.confine(report, seconds, _MEMORY)
        _report(module, sample, report)
    finally:
        os._exit(0)


def _report(module, sample: Sample, report: int):
    """Scores a sample and writes the result, a line."""
    try:
        result = {"score": asdict(module.score_inside(sample))}
    except Exception as error:
        result = {"problem": f"{type(error).__name__}: {error}"[:1000]}
    content = json.dumps(result).encode() + b"\n"
    while content:
        content = content[os.write(report, content) :]


def _result(content: bytes | None, seconds: float, ended: str) -> dict:
    """The result that a child has written, or why there is none: it took too long, or has `ended`."""
    if content is None:
        return {"problem": f"no result within {seconds:g} s", "late": True}
    try:
        return _checked(json.loads(content))
    except (ValueError, TypeError, KeyError, RecursionError):
        return {"problem": ended}


def _checked(result: dict) -> dict:
    """The child's result, reduced to what a result may hold: the child is in the hands of the response."""
    if "score" not in result:
        return {"problem": str(result["problem"])}
    fields = result["score"]
    score = Score(
        reward=value_of("reward", fields["reward"]),
        correct=bool(fields["correct"]),
        parts=parts_of(fields["parts"]),
        extracted=None if fields["extracted"] is None else str(fields["extracted"]),
    )
    if not 0.0 <= score.reward <= 1.0:
        raise ValueError("outside 0 to 1")
    return {"score": asdict(score)}


if __name__ == "__main__":
    main()
