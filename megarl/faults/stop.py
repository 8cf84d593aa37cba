"""Stops a run at a step's end after SIGTERM, SIGINT or SIGUSR1: all ranks agree on the step, without a collective.

The signals may reach one rank or all, in different steps. Whether step N begins is one entry of the rendezvous store:
the first rank that comes to it writes "go", a rank with a signal writes "stop" to the first step that no rank has
begun. No rank waits; a step costs each rank one request.

A signal is read by a thread from a pipe: Python's own handlers run only when the main thread returns from native code,
which a collective may never do.
"""

import contextlib
import os
import select
import signal
import sys
import threading
import time

import torch.distributed as dist

from megarl.child_process import STOP_SIGNALS
from megarl.faults import heartbeat

SAME_SIGNAL = 1.0  # seconds; a terminal's Ctrl-C reaches a rank twice, from the terminal and from its launcher
KEY = "megarl/begins"
KEPT = 64  # entries of the last steps; no rank is that many steps after another
_GO, _STOP = "go", "stop"


def begins(store, rank: int, step: int) -> bool:
    """Whether this step begins: one answer for all ranks. Every rank asks for every step, in order.

    `store`: of this process's main thread.
    """
    if rank == 0 and step > KEPT:
        store.delete_key(f"{KEY}/{step - KEPT}")
    return store.compare_set(f"{KEY}/{step}", "", _GO).decode() == _GO


def refuse_next_step(store, step: int) -> tuple[int, bool]:
    """Makes all ranks stop before the first step after `step` that nobody has begun.

    Returns:
        That step, and whether this rank was the first to refuse it.
    """
    while True:
        step += 1
        if store.check([f"{KEY}/{step}"]):
            if store.get(f"{KEY}/{step}").decode() == _STOP:
                return step, False
        elif store.compare_set(f"{KEY}/{step}", "", _STOP).decode() == _STOP:
            return step, True


class RunStop:
    """The signals of this process, from `install` on, and whether the next step may begin."""

    def __init__(self, rank: int, grace: float, step: int, store=None):
        """
        Args:
            grace: seconds that the running step has to end, `--exit-grace`.
            step: the last step that this rank has begun.
            store: None: that of the default process group.
        """
        self._rank, self._grace, self.step = rank, grace, step
        self.store = store or dist.distributed_c10d._get_default_store()
        self._store = self.store.clone()  # requests of two threads to one client get mixed up
        self.received: int | None = None  # the first signal
        self._step_ended = threading.Event()
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)

    def install(self):
        """From now on signals stop the run instead of ending it; outside of the main thread they keep their effect."""
        with contextlib.suppress(ValueError):
            signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
            for number in STOP_SIGNALS:
                signal.signal(number, _noted)
            threading.Thread(target=self._run, name="signals", daemon=True).start()

    def may_begin(self, step: int) -> bool:
        """Whether all ranks begin this step. If not, the last one has ended in time: what is left is to save."""
        if begins(self.store, self._rank, step):
            self.step = step
            return True
        self._step_ended.set()
        return False

    def _run(self):
        number = self._next(None)
        assert number is not None  # without a deadline it waits for one
        self.received, deadline = number, time.monotonic() + self._grace
        first = time.monotonic()
        self._stop(signal.Signals(number).name)
        while True:
            number = self._next(None if self._step_ended.is_set() else deadline)
            if number is not None and time.monotonic() - first >= SAME_SIGNAL:
                os._exit(128 + number)
            if number is None and not self._step_ended.is_set():
                _say(f"step {self.step} did not end within --exit-grace {self._grace:g} s: dropped, nothing is saved")
                os._exit(128 + (self.received or 0))

    def _stop(self, name: str):
        if heartbeat.has_failed(self._store):  # a launcher ends this rank after another one failed
            os._exit(1)
        step, is_first = refuse_next_step(self._store, self.step)
        if is_first:
            _say(f"{name}: stopping before step {step}; a second signal ends the run at once")

    def _next(self, deadline: float | None) -> int | None:
        """The next of `STOP_SIGNALS`; None if there is none until the deadline. Python also writes other signals that
        have a handler into the pipe, such as the alarm of a verifier that takes too long."""
        while True:
            seconds = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready, _, _ = select.select([self._reader], [], [], seconds)
            if not ready:
                return None
            number = os.read(self._reader, 1)[0]
            if number in STOP_SIGNALS:
                return number


def _noted(number, frame):
    """Python calls a handler besides writing to the pipe; nothing is left to do."""


def _say(text: str):
    print(f"megarl: {text}", file=sys.stderr, flush=True)


def _release_in_child():
    """A forked process, such as a writer of checkpoints, is ended by its parent, not by a signal to the whole job."""
    if signal.getsignal(signal.SIGTERM) is _noted:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for number in (signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)


os.register_at_fork(after_in_child=_release_in_child)
