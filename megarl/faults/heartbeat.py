"""Finds ranks that hang: every rank publishes what it does, and rank 0 sees who has made no progress for too long.

Waiting is not hanging: a rank may wait in a collective for hours while another role works, so collectives have no time
limit (`role_mesh.NO_LIMIT`). A run is hung when, for `--distributed-timeout-minutes`,

- a rank has sent no heartbeat: its process is gone, stopped, or holds the interpreter's lock; or
- no rank of a role that computes (`COMPUTING`) has made progress: there its ranks wait for nobody but each other; or
- no rank of the world has made progress.

Phases made of many like pieces, such as decode steps, have a shorter limit once they are known: `USUAL` times the
longest silence so far (`hang_report.REGULAR`).

Then a table of all ranks is printed, every rank writes its stacks and last collectives (`hang_report`) and ends with
status 1. Rank 0 watches all ranks, all ranks watch rank 0. A thread does this with a store client of its own and no
collective. In each interval (a twentieth of the limit, at most 30 s) a rank sends one `set` and one `get`, rank 0 one
`set` and one `multi_get`: 2 requests a rank. A run with a folder has shorter intervals, for `status.json`: 2 s, or in
large worlds such that rank 0 reads `STATUS_RANKS` ranks a second.
"""

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

from megarl.deferred import has_met, torch
from megarl.faults import hang_report
from megarl.observe import activity, status_file
from megarl.observe.timers import Timers

MAX_INTERVAL = 30.0  # seconds between two heartbeats
INTERVALS = 20  # heartbeats in the limit
MAX_LOOK = 5.0  # seconds that a heartbeat may take; if it took longer, this process was stopped
STATUS_INTERVAL = 2.0  # seconds at least between two versions of status.json
STATUS_RANKS = 64  # whose states rank 0 reads a second for it
IO_BYTES = 1 << 20  # read or written: progress, e.g. of a checkpoint
PROCESS_IO = Path("/proc/self/io")
KEY = "megarl/heartbeat"
WRITTEN = "megarl/hang"  # keys of ranks that have written their files about a hang
REPORTING_RANKS = (0, 1)  # ranks that may say that the run is hung


def collectives_so_far() -> int:
    """Collectives that this rank has started, over all its groups."""
    total = 0
    for group in list(torch.distributed.distributed_c10d._world.pg_map):
        with contextlib.suppress(RuntimeError):  # a group that is being created or destroyed
            total += group._get_backend(group._device_types[0])._get_sequence_number_for_group()  # type: ignore[attr-defined]
    return total


def progress_so_far(collectives: int) -> int:
    """A number that changes whenever this rank makes progress: by ticks, `collectives_so_far`, and file traffic."""
    transferred = 0  # where the system does not tell it
    with contextlib.suppress(OSError, ValueError, IndexError):
        transferred = sum(int(line.split()[1]) for line in PROCESS_IO.read_text().splitlines())
    return activity.ticks() + collectives + transferred // IO_BYTES


class Heartbeat:
    """Publishes this rank's state and watches the others, in a thread, until `finish`."""

    def __init__(self, store, rank: int, size: int, limit: timedelta, timers: Timers,
                 end: Callable[[int], None] = os._exit, folder: Path | None = None):  # fmt: skip
        """
        Args:
            store: a client of its own: requests of two threads to one client get mixed up.
            limit: longest time without progress.
            end: ends this process with a status.
            folder: of the run, for rank 0's status.json and each rank's files about a hang; None: no files.
        """
        self._store, self._rank, self._size, self._timers, self._end = store, rank, size, timers, end
        self._folder, self._is_ending = folder, False
        self.limit, self.interval = limit.total_seconds(), min(MAX_INTERVAL, limit.total_seconds() / INTERVALS)
        self._patience = 2 * self.interval
        if folder is not None:
            self.interval = min(self.interval, max(STATUS_INTERVAL, size / STATUS_RANKS))
        self._store.set_timeout(limit)
        self._main = threading.get_ident()
        self._beats = 0
        self._finished = threading.Event()
        self._watch = hang_report.Watch(self.limit, time.monotonic())
        self._status = None
        if folder is not None and rank == 0:
            self._status = status_file.StatusFile(folder, size, self.interval, self.limit)
        self._publish()
        self._answered = time.monotonic()  # when the store last did what it was asked for
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()
        threading.Thread(target=self._watch_store, name="heartbeat store", daemon=True).start()

    def finish(self):
        """Publishes that this rank has ended its work, and stops. Rank 0 waits for all: it may serve the store."""
        self._finished.set()
        self._thread.join()

    def _state(self, verdict: str | None = None) -> dict:
        role, phase = self._timers.current() or (None, None)
        collectives = collectives_so_far()
        self._beats += 1
        return {
            "beat": self._beats,
            "role": role,
            "phase": phase,
            "step": self._timers.step,
            "seconds": self._timers.current_seconds(),
            "progress": progress_so_far(collectives),
            "collectives": collectives,
            "where": hang_report.where(sys._current_frames().get(self._main)),
            "done": self._finished.is_set(),
            "verdict": verdict,
        }

    def _publish(self, verdict: str | None = None):
        self._store.set(f"{KEY}/{self._rank}", json.dumps(self._state(verdict)))

    def _run(self):
        try:
            began = time.monotonic()
            while not self._finished.wait(self.interval):
                began, before = time.monotonic(), began
                self._watch.skip(max(0.0, began - before - 2 * self.interval - MAX_LOOK))
                self._publish()
                self._look()
                self._answered = time.monotonic()
                if self._status is not None:
                    self._status.post(self._watch.rows(range(self._size)))
            self._publish()
            self._store.set(f"{KEY}/{self._rank}/done", "")
            if self._rank == 0:
                self._store.wait([f"{KEY}/{rank}/done" for rank in range(self._size)])
                self.end_status(status_file.ENDED)
        except (RuntimeError, ValueError) as error:  # no answer from the store within the limit, or its process is gone
            if self._finished.is_set() and self._rank == 0:
                self._watch.update(self._read(range(self._size)), time.monotonic())
                self._stop("some ranks do not end", self._watch.table(range(self._size)))
            elif not self._finished.is_set():
                self._stop(f"the store does not answer rank {self._rank}: {str(error).splitlines()[0]}", [])

    def _watch_store(self):
        """Ends this process if the store does not answer. Requests to a stopped process wait for ever."""
        while not self._finished.wait(self.interval):
            seconds = 0.0 if self._is_ending else time.monotonic() - self._answered
            if seconds >= self.limit + self._patience:
                self._stop(f"the store has not answered rank {self._rank} for {seconds:.0f} s", [])

    def _look(self):
        """Reads the other ranks' states and ends this process if the run is hung."""
        everyone = range(self._size)
        states = self._read(everyone if self._rank == 0 else REPORTING_RANKS)
        self._watch.update(states, time.monotonic())
        if self._rank == 0:
            problem = self._watch.problem(everyone)
            if problem:
                self.end_status(status_file.HUNG, problem)  # first: other ranks end the run when they read the verdict
                self._publish(problem)
                self._stop(problem, self._watch.table(everyone), self._answering(everyone))
            for line in self._watch.warnings(everyone):
                print(f"megarl: warning: {line}", file=sys.stderr, flush=True)
            return
        if any(states.get(rank, {}).get("verdict") for rank in REPORTING_RANKS):
            self._follow()  # that rank has said why
            return
        # Rank 1 speaks for rank 0; the others only if rank 1 does not end the run either.
        patience = 0 if self._rank == 1 else self._patience
        problem = self._watch.silence(0, patience)
        if problem:
            self._watch.update(self._read(everyone), time.monotonic())
            if self._rank == 1:
                self._publish(problem)
                self._stop(problem, self._watch.table(everyone), self._answering(everyone))
            else:
                self._stop(problem, [])

    def _read(self, ranks) -> dict[int, dict]:
        """The states of these ranks; without those that have published none yet."""
        keys = [f"{KEY}/{rank}" for rank in ranks]
        if not self._watch.has_all and not self._store.check(keys):
            keys = [key for key in keys if self._store.check([key])]
        found = self._store.multi_get(keys) if keys else []
        return {int(key.rsplit("/", 1)[1]): json.loads(value) for key, value in zip(keys, found, strict=True)}

    def _answering(self, ranks) -> list[int]:
        """The other ranks that still send heartbeats, so that they can write their files."""
        return [rank for rank in ranks if rank != self._rank and not self._watch.silence(rank)]

    def _stop(self, problem: str, table: list[str], others: Sequence[int] = ()):
        """Says why the run is hung and ends this process, once this rank and `others` have written their files.

        A launcher kills all ranks when the first one ends.
        """
        self._is_ending = True
        print("\n".join([f"megarl: hung: {problem}", *table]), file=sys.stderr, flush=True)
        self.end_status(status_file.HUNG, problem)
        if self._folder is not None:
            self._write_files()
            missing = self._wait_for([f"{WRITTEN}/{rank}" for rank in others])
            if table:
                self._say_where(missing)
            if others:
                self._tell("all")
        self._end(1)

    def end_status(self, state: str, problem: str | None = None):
        """Writes the last status.json, on rank 0 of a run with a folder."""
        if self._status is not None:
            self._status.close(self._watch.rows(range(self._size)), state, problem)

    def _follow(self):
        self._is_ending = True
        if self._folder is not None:
            self._write_files()
            self._tell(str(self._rank))
            self._wait_for([f"{WRITTEN}/all"])
        self._end(1)

    def _write_files(self):
        role, phase = self._timers.current() or ("program", "between phases")
        hang_report.write(self._folder, self._rank, f"{role}/{phase} of step {self._timers.step}")

    def _wait_for(self, keys: list[str]) -> list[str]:
        """Waits until the store has all keys, for two heartbeats and what writing may take; returns those missing."""
        deadline = time.monotonic() + self._patience + hang_report.RECORDER_SECONDS
        with contextlib.suppress(RuntimeError):  # the store is gone
            while keys and time.monotonic() < deadline:
                time.sleep(min(self.interval, 0.1))
                keys = [key for key in keys if not self._store.check([key])]
        return keys

    def _tell(self, who: str):
        with contextlib.suppress(RuntimeError):
            self._store.set(f"{WRITTEN}/{who}", "")

    def _say_where(self, missing: list[str]):
        without = [key.rsplit("/", 1)[1] for key in missing]
        note = f"; none of ranks {', '.join(without)}" if without else ""
        folder = self._folder / hang_report.FOLDER
        line = f"megarl: hung: stacks and last collectives of each rank are in {folder}/rank_*.txt{note}"
        print(line, file=sys.stderr, flush=True)


def report_failure():
    """Reports to the other ranks' signal handlers (if the store answers) and status.json that this rank failed."""
    if _running is not None:
        _running.end_status(status_file.FAILED)
    is_first_to_fail()  # it may have reported before


def is_first_to_fail() -> bool | None:
    """Reports to the other ranks that this rank fails; whether no other one had before. None: the store is gone."""
    if not has_met():
        return True
    rank, store = str(torch.distributed.get_rank()), torch.distributed.distributed_c10d._get_default_store()
    try:
        return store.compare_set(f"{KEY}/failed", "", rank).decode() == rank
    except RuntimeError:
        return None


def has_failed(store) -> bool:
    """Whether a rank has reported a failure, or the store is gone."""
    try:
        return store.check([f"{KEY}/failed"])
    except RuntimeError:
        return True


_running: Heartbeat | None = None


def start(limit: timedelta, timers: Timers, folder: Path | None = None):
    """Starts this process's heartbeat in the default process group; ends an earlier one. `folder`: of the run."""
    global _running
    finish()
    dist = torch.distributed
    store = dist.distributed_c10d._get_default_store().clone()
    _running = Heartbeat(store, dist.get_rank(), dist.get_world_size(), limit, timers, folder=folder)


def finish():
    """Ends this process's heartbeat: this rank has ended its work."""
    global _running
    if _running is not None:
        _running.finish()
        _running = None
