"""Programs on ranks that the launcher forks from the test process, with a fault in a phase of one rank."""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from megarl import launcher, train_rl, train_sft
from megarl.checkpoint import host_memory
from megarl.extras import report
from megarl.faults import heartbeat, stop
from megarl.observe.timers import Timers
from megarl.roles.actor import Actor
from megarl.trainers import launch as launch_module
from megarl.trainers.evaluator import Evaluator
from tests.helpers import programs
from tests.helpers.worlds import SAFETY_SECONDS

PROGRAMS = {"rl": train_rl.train, "sft": train_sft.train}
EVALUATE = ("evaluate", "evaluate")  # stands for `Evaluator.evaluate`, which has no phase of its own


def run(argv: list[str], ranks: int, prepare: Callable[[], None] = lambda: None, restarts: int = 0, name="rl") -> int:
    """Exit status of a program on forked ranks; `prepare` runs on each before the program starts."""

    def rank() -> int:
        sys.argv = [name, *argv]
        report.write_report = lambda folder: None
        prepare()
        launch_module.launch(PROGRAMS[name], name)
        return 0

    return launcher.run_ranks(rank, ranks, restarts)


def rank() -> int:
    """This process's rank."""
    return int(os.environ["RANK"])


def attempt() -> int:
    """How often the ranks were started before."""
    return int(os.environ[launcher.ATTEMPT])


def in_phase(where: tuple[str, str], step: int, fault: Callable[[], None]):
    """Makes this rank call `fault` inside a phase (role, name) of a step, each time that it enters it."""
    phase, evaluate = Timers.phase, Evaluator.evaluate

    @contextlib.contextmanager
    def faulty(self, role, name):
        with phase(self, role, name):
            if (role, name) == where and self.step == step:
                fault()
            yield

    def faulty_evaluate(self, *args):
        if self.timers.step == step:
            fault()
        return evaluate(self, *args)

    Timers.phase = faulty
    if where == EVALUATE:
        Evaluator.evaluate = faulty_evaluate


def as_nodes(memory: Path):
    """Makes each rank a node of its own, with its own folder in host memory."""
    folder = memory / f"node-{rank()}"
    folder.mkdir(exist_ok=True)
    os.environ |= {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", host_memory.ROOT: str(folder)}


def damage(*folders: Path):
    """Changes a byte of the first rank's file of each checkpoint in these folders."""
    files = [path for folder in folders for path in folder.rglob("step_*/__0_0.distcp")]
    assert len(files) == len(folders)
    for file in files:
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)


_scored: list = []
_signals: list[int] = []  # that this rank has sent to itself


def graded_reward(sample) -> float:
    """A plug-in like the one of tests.helpers.programs; kills its rank in the first start, at the fifth response."""
    _scored.append(sample)
    if attempt() == 0 and len(_scored) == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return programs.graded_reward(sample)


def late_graded_reward(sample) -> float:
    """As `graded_reward`, in the third step of twelve responses, with evaluations of four."""
    _scored.append(sample)
    if attempt() == 0 and len(_scored) == 41:
        os.kill(os.getpid(), signal.SIGKILL)
    return programs.graded_reward(sample)


def kill_second_rank(sample) -> float:
    """A plug-in that kills rank 1 in its second step."""
    _scored.append(sample)
    if rank() == 1 and len(_scored) > 6:
        os.kill(os.getpid(), signal.SIGKILL)
    return programs.graded_reward(sample)


def fail_on_second_rank(sample) -> float:
    """A plug-in that fails in the second step on rank 1."""
    _scored.append(sample)
    return {"first": programs.graded_reward(sample)}["second" if rank() == 1 and len(_scored) > 6 else "first"]


def raise_error():
    """The fault of a rank that fails."""
    raise ValueError("injected")


def sleep_for_ever():
    """The fault of a rank that hangs."""
    while True:
        time.sleep(1000)


def signal_self(number: int):
    """The fault of a rank that gets one signal; returns when it has been dealt with."""
    if _signals:
        return  # an evaluation enters the phases of a step again
    _signals.append(number)
    refuse, is_done = stop.refuse_next_step, threading.Event()

    def refuse_and_tell(*args):
        result = refuse(*args)
        is_done.set()
        return result

    stop.refuse_next_step = refuse_and_tell
    os.kill(os.getpid(), number)
    assert is_done.wait(SAFETY_SECONDS)


def stopped_in_update(rank: int, parsed, step: int):
    """Runs a program of one rank of a world that a signal stops while a step is trained on."""
    update = Actor.update

    def updated(actor, batch, kl_coefficient):
        if rank == 0 and batch.step == step:
            stop.refuse_next_step(dist.distributed_c10d._get_default_store(), step)
        update(actor, batch, kl_coefficient)

    Actor.update = updated
    programs.in_world(rank, "rl", parsed)


def watch_after(asleep: Path, seconds: float = 1.0):
    """Makes this rank's heartbeat frequent, and the limit short once the file exists: before that nothing is hung."""
    heartbeat.MAX_INTERVAL, look = 0.05, heartbeat.Heartbeat._look

    def impatient(self):
        if asleep.exists():
            self._watch._limit = seconds
        look(self)

    heartbeat.Heartbeat._look = impatient
