"""Worker processes that run verifiers: a deadline for each call, and a new process for one that hangs or dies."""

import contextlib
import os
import pickle
import selectors
import signal
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence

from megarl.rewards.base import Job, Score, failure

_START_SECONDS = 300.0  # for the imports of a worker; a plug-in may bring a model
SIZE = struct.Struct("<Q")


def pack(message: object) -> bytes:
    """A message for a pipe: its size, then its pickle."""
    data = pickle.dumps(message)
    return SIZE.pack(len(data)) + data


def unpack(buffer: bytes | bytearray) -> object | None:
    """The message that a buffer holds, None while it is incomplete. There is never more than one under way."""
    if len(buffer) < SIZE.size or len(buffer) < SIZE.size + SIZE.unpack_from(buffer)[0]:
        return None
    return pickle.loads(memoryview(buffer)[SIZE.size :])


class Workers:
    """`count` processes, started when the first jobs come; `setup` is what each gets before its jobs (`worker.py`)."""

    def __init__(self, count: int, setup: object):
        self._count = count
        self._setup = pack(setup)
        self._workers: list[_Worker] = []

    def run(self, jobs: Sequence[Job]) -> list[list[Score | str]]:
        """For each job, in order, what `Reward.outcomes` gives: a Score or a reason for each sample.

        A job that takes longer than its seconds, or whose process dies, has reasons alone; no other job notices.
        RuntimeError if a worker cannot start at all.
        """
        try:
            return self._run(jobs)
        except BaseException:
            self.close()  # a job under way would answer into the next call
            raise

    def close(self):
        """Ends all processes, and what they have started."""
        for worker in self._workers:
            worker.end()
        self._workers = []

    def _run(self, jobs: Sequence[Job]) -> list[list[Score | str]]:
        waiting = deque(range(len(jobs)))
        done: list[list[Score | str]] = [[] for _ in jobs]
        while True:
            for place in range(self._count):
                self._employ(place, jobs, waiting)
            busy = [worker for worker in self._workers if worker.busy]
            if not busy:
                return done
            _wait(busy)
            for worker in busy:
                number = worker.job
                outcome = worker.outcome(jobs)
                if outcome is not None:
                    done[number] = outcome

    def _employ(self, place: int, jobs: Sequence[Job], waiting: deque[int]):
        if not waiting:
            return
        if place == len(self._workers):
            self._workers.append(_Worker(self._setup))
        elif not self._workers[place].lives():
            self._workers[place] = _Worker(self._setup)
        worker = self._workers[place]
        if not worker.busy:
            number = waiting.popleft()
            worker.begin(number, jobs[number])


def _wait(busy: list["_Worker"]):
    """Until a worker has sent something, or ended, or is past its deadline; takes in what was sent."""
    with selectors.DefaultSelector() as selector:
        for worker in busy:
            selector.register(worker.process.stdout, selectors.EVENT_READ, worker)
        earliest = min(worker.deadline for worker in busy)
        for key, _ in selector.select(max(0.0, earliest - time.monotonic())):
            key.data.receive()


class _Worker:
    """One process: starting (`job` None) or at a job until its deadline, or idle."""

    def __init__(self, setup: bytes):
        # A session of its own, so that all that it starts can be ended with it. No other file is passed on.
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "megarl.rewards.worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path)},
            start_new_session=True,
        )  # fmt: skip
        self.job: int | None = None
        self._buffer, self._closed = bytearray(), False
        self._send(setup, _START_SECONDS)

    def begin(self, number: int, job: Job):
        self.job = number
        self._send(pack(job), job.seconds)

    def receive(self):
        """Takes in a piece of the answer; an end of the pipe is the end of the process."""
        piece = os.read(self.process.stdout.fileno(), 1 << 20)
        self._buffer += piece
        self._closed = not piece

    def outcome(self, jobs: Sequence[Job]) -> list[Score | str] | None:
        """The result of the job, once it is there or never will be; else None. A start is checked here, too."""
        answer = unpack(self._buffer)
        problem = None
        if self._closed:
            problem = f"its worker process ended with status {self._status()}"
        elif answer is None and time.monotonic() >= self.deadline:
            problem = f"no result within {self._seconds:g} s"
        if answer is None and problem is None:
            return None
        number, self.job, self.busy, self._buffer = self.job, None, False, bytearray()
        if answer is None:
            self.end()
        if number is None:
            if answer is None or answer != "ready":
                raise RuntimeError(f"a worker of the verifiers did not start: {answer or problem}")
            return None
        return answer or [failure(jobs[number].name, sample, problem) for sample in jobs[number].samples]

    def lives(self) -> bool:
        return self.busy or self.process.poll() is None

    def end(self):
        # The group first: once its leader is reaped, another group may get the number.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()

    def _send(self, message: bytes, seconds: float):
        self.busy, self._seconds, self.deadline = True, seconds, time.monotonic() + seconds
        with contextlib.suppress(OSError):  # it has ended: `receive` will see that
            self.process.stdin.write(message)
            self.process.stdin.flush()

    def _status(self) -> int:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=1.0)
        return self.process.poll()
