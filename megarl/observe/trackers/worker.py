"""The process of one tracker: reads a run and its rows from standard input, one JSON object a line, and delivers them.

Rows that cannot be delivered wait and are tried again, with the tracker's opening if that failed. The first failure is
one warning; the run continues. If the input ends without a last line, the run has failed.
"""

import contextlib
import json
import os
import sys
import time
from collections import deque

from megarl import stop_signals
from megarl.errors import warn
from megarl.observe.trackers.base import TrackedRun, Tracker
from megarl.observe.trackers.process import MAX_ROWS

RETRY_SECONDS = 30.0  # between two attempts after a failure


def open_tracker(run: TrackedRun) -> Tracker:
    """The tracker of a run; imports its package. Raises whatever the package raises."""
    if run.tracker == "wandb":
        from megarl.observe.trackers.wandb_run import WandbTracker

        return WandbTracker(run)
    from megarl.observe.trackers.mlflow_run import MlflowTracker

    return MlflowTracker(run)


class Delivery:
    """Rows on their way to a tracker that may fail."""

    def __init__(self, run: TrackedRun):
        self._run = run
        self._tracker: Tracker | None = None
        self._waiting: deque[tuple[int, dict[str, float]]] = deque(maxlen=MAX_ROWS)
        self._warned, self._retry_at = False, 0.0

    def add(self, step: int, scalars: dict[str, float]):
        """Delivers a row and all that wait, if the tracker works."""
        self._waiting.append((step, scalars))
        if time.monotonic() >= self._retry_at:
            self._attempt()

    def open(self):
        """Opens the tracker before the first row."""
        self._attempt()

    def end(self, failed: bool):
        """Delivers the rest and closes the tracker."""
        self._attempt()
        if self._tracker is not None:
            with self._failures():
                self._tracker.close(failed)

    def _attempt(self):
        with self._failures():
            if self._tracker is None:
                self._tracker = open_tracker(self._run)
            while self._waiting:
                self._tracker.write(*self._waiting[0])
                self._waiting.popleft()

    @contextlib.contextmanager
    def _failures(self):
        """Context in which any failure is one warning."""
        try:
            yield
        except Exception as error:
            self._retry_at = time.monotonic() + RETRY_SECONDS
            if not self._warned:
                self._warned = True
                reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
                warn([f"--trackers {self._run.tracker}: {reason}; the run goes on and tries again"])


def redirect(log: str):
    """Sends what packages print to a file; this module's warnings still reach the terminal."""
    terminal = os.dup(2)
    with contextlib.suppress(OSError), open(log, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stderr = os.fdopen(terminal, "w", encoding="utf-8", errors="backslashreplace")


def main():
    """Runs until the input ends."""
    stop_signals.outlive(in_programs=True)  # those of the trackers' packages
    redirect(sys.argv[1])
    delivery, failed = None, True
    for line in sys.stdin.buffer:
        row = json.loads(line)
        if delivery is None:
            delivery = Delivery(TrackedRun(**row))
            delivery.open()
        elif "end" in row:  # not the end of the input: a process that the rank has forked may hold the pipe, too
            failed = False
            break
        else:
            delivery.add(row["step"], row["scalars"])
    if delivery is not None:
        delivery.end(failed)
    sys.stderr.flush()
    os._exit(0)  # exit handlers of the packages could wait for the network again


if __name__ == "__main__":
    main()
