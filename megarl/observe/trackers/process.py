"""A tracker in a process of its own, as rank 0 sees it: nothing that the tracker does can delay or end the training.

The network, the packages' threads, their exit handlers and the seconds that their import takes are all in that process.
Rank 0 hands rows to a thread, which writes them into a pipe. If the rank dies, the pipe ends and the process says so to
the tracker. If the process dies, or cannot keep up, rank 0 warns once and continues.
"""

import contextlib
import dataclasses
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path

from megarl import stop_signals
from megarl.errors import warn
from megarl.observe.trackers.base import TrackedRun

CLOSE_SECONDS = 30.0  # that a tracker has to send the rest at the end of a run
MAX_ROWS = 10_000  # that wait for the tracker; later ones are dropped
# The packages would otherwise report their use, or their errors, to their makers.
QUIET = {"WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true", "MLFLOW_DISABLE_TELEMETRY": "true"}
END = {"end": True}  # the last line of a run that has not failed


class TrackerProcess:
    """A `Tracker` that hands everything to `megarl.observe.trackers.worker`."""

    def __init__(self, run: TrackedRun, log: Path):
        """`log`: file for what the tracker's package prints."""
        self._name, self._warned = run.tracker, False
        self._rows: queue.Queue[dict | None] = queue.Queue(MAX_ROWS)
        # The project's folder: a program may have been started in it without being installed.
        places = [str(Path(__file__).parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, **QUIET, "PYTHONPATH": os.pathsep.join(places)}
        command = [sys.executable, "-m", "megarl.observe.trackers.worker", str(log)]
        # A session of its own: Ctrl-C reaches the ranks, which end the run in order.
        with stop_signals.blocked():
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=environment, start_new_session=True
            )
        self._rows.put(dataclasses.asdict(run))
        self._thread = threading.Thread(target=self._send, name=f"tracker {run.tracker}", daemon=True)
        self._thread.start()

    def write(self, step: int, scalars: dict[str, float]) -> None:
        """Passes on the metrics of a step; never waits."""
        self._hand_over({"step": step, "scalars": scalars})

    def close(self, failed: bool = False) -> None:
        """Waits until the tracker has everything, at most `CLOSE_SECONDS`."""
        if not failed:
            self._hand_over(END)
        with contextlib.suppress(queue.Full):
            self._rows.put_nowait(None)
        try:
            status = self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._warn(f"had not taken everything {CLOSE_SECONDS:g} s after the end of the run")
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        else:
            if status:
                self._warn(f"its process ended with status {status}")
        with contextlib.suppress(queue.Full):  # again: the queue may have been full
            self._rows.put(None, timeout=1.0)
        self._thread.join(1.0)

    def _hand_over(self, row: dict):
        try:
            self._rows.put_nowait(row)
        except queue.Full:
            self._warn(f"cannot keep up: {MAX_ROWS} steps wait for it, later ones are not sent")

    def _send(self):
        """Writes the rows into the pipe until the end, or until the process is gone."""
        with contextlib.suppress(OSError):  # `close` says why, if the process has not done so
            with self._process.stdin as pipe:
                while (row := self._rows.get()) is not None:
                    pipe.write(json.dumps(row).encode() + b"\n")
                    pipe.flush()
            return
        while self._rows.get() is not None:  # nobody reads any more
            pass

    def _warn(self, problem: str):
        if not self._warned:
            self._warned = True
            warn([f"--trackers {self._name}: {problem}; the run and its metrics.jsonl are complete"])
