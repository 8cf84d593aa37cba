"""Worker processes that run verifiers, with a deadline per call; one that hangs or dies is replaced.

A worker is `python -m megarl.rewards.chosen_verifiers FD`.
"""

import time
from collections import defaultdict, deque
from collections.abc import Sequence
from multiprocessing import connection

from megarl.child_process import Child
from megarl.rewards.base import Job, Score, TimedOut, failure

_START_SECONDS = 300.0  # for a worker's imports; a plug-in may load a model


class Workers:
    """`count` processes, started with the first jobs; each gets `setup` as its first message."""

    def __init__(self, count: int, setup: object):
        self.count = count
        self.seconds: dict[str, float] = defaultdict(float)  # of the calls of each verifier in the last `run`, together
        self._setup = setup
        self._workers: list[_Worker] = []

    def run(self, jobs: Sequence[Job]) -> list[list[Score | str]]:
        """For each job, in order, the result of `Verifier.outcomes`: a Score or a reason for each sample. If a job
        exceeds its seconds or its process dies, all its samples get the reason; other jobs are unaffected. RuntimeError
        if a worker cannot start.
        """
        try:
            return self._run(jobs)
        except BaseException:
            self.close()  # else a running job's answer would arrive in the next call
            raise

    def close(self):
        """Kill all workers and the processes they have started."""
        for worker in self._workers:
            worker.end()
        self._workers = []

    def _run(self, jobs: Sequence[Job]) -> list[list[Score | str]]:
        waiting, self.seconds = deque(range(len(jobs))), defaultdict(float)
        done: list[list[Score | str]] = [[] for _ in jobs]
        while True:
            for slot in range(self.count):
                self._assign(slot, jobs, waiting)
            busy = [worker for worker in self._workers if worker.busy]
            if not busy:
                return done
            earliest = min(worker.deadline for worker in busy)
            connection.wait([worker.connection for worker in busy], max(0.0, earliest - time.monotonic()))
            for worker in busy:
                number = worker.job
                outcome = worker.outcome(jobs)
                if outcome is not None:
                    done[number] = outcome
                    self.seconds[jobs[number].name] += time.monotonic() - worker.started

    def _assign(self, slot: int, jobs: Sequence[Job], waiting: deque[int]):
        if not waiting:
            return
        if slot == len(self._workers):
            self._workers.append(_Worker(self._setup))
        elif not (self._workers[slot].busy or self._workers[slot].lives()):
            self._workers[slot] = _Worker(self._setup)
        worker = self._workers[slot]
        if not worker.busy:
            number = waiting.popleft()
            worker.begin(number, jobs[number])


class _Worker(Child):
    """One process: starting (busy, `job` is None), running a job until its deadline, or idle."""

    started: float  # when its job was, on the monotonic clock
    deadline: float  # of the job, on this clock
    _seconds: float

    def __init__(self, setup: object):
        super().__init__("megarl.rewards.chosen_verifiers")
        self.job: int | None = None
        self._limited(setup, _START_SECONDS)

    def begin(self, number: int, job: Job):
        self.job = number
        self._limited(job, job.seconds)

    def outcome(self, jobs: Sequence[Job]) -> list[Score | str] | None:
        """The job's result or reasons for its failure; None while it runs. Also checks that the worker has started."""
        answer, problem, late = None, None, False
        try:
            if self.connection.poll():
                answer = self.connection.recv()
            elif time.monotonic() >= self.deadline:
                problem, late = f"no result within {self._seconds:g} s", True
            else:
                return None
        except (EOFError, OSError):
            problem = f"its worker process ended with status {self.status()}"
        number = self.job
        self.job, self.busy = None, False
        if problem:
            self.end()
        if number is None:
            if answer != "ready":
                raise RuntimeError(f"a worker of the verifiers did not start: {answer or problem}")
            return None
        reason = TimedOut if late else str
        return answer or [reason(failure(jobs[number].name, sample, problem)) for sample in jobs[number].samples]

    def _limited(self, message: object, seconds: float):
        self.busy, self._seconds = True, seconds
        self.started = time.monotonic()
        self.deadline = self.started + seconds
        self.send(message)
