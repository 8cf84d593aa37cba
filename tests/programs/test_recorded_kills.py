"""Recorded runs that are killed at random instants: no line of the schedule is lost, and its replay has their bytes."""

import os
import random
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

from megarl.checkpoint import folders
from megarl.rollout import response_log, schedule, waiting_groups
from megarl.rollout.schedule import Recording
from tests.helpers.rollout.recorded_runs import (
    ONE,
    RECORDED,
    RUNS,
    TWO,
    assert_same,
    clocked,
    parsed_of,
    records_of,
    run,
)
from tests.helpers.waiting import wait_until
from tests.helpers.worlds import RankFailed, run_world

STEPS, INTERVAL, KILLS, HALF = 20, 3, 5, 8  # HALF: a step whose line only one replica writes
FLAGS = f"--train-iters {STEPS} --lr-decay-iters {STEPS} --save-interval {INTERVAL}"
EVENTS = {  # what a rank counts -> rank -> how often in about three steps
    "record of the schedule": {1: 3, 2: 3},
    "half a record of the schedule": {1: 3, 2: 3},
    "change of a file": {0: 30, 1: 7, 2: 7},
    "message": {0: 12, 1: 12, 2: 12},
    "transfer of weights": {0: 4, 1: 4, 2: 4},
}
RUNS_TO_KILL = ("two replicas", "over-sampling", "partial rollouts", "turns")


class Kill(NamedTuple):
    """A planned SIGKILL of one rank."""

    event: str
    rank: int
    number: int  # of the event, from 1


def plan(seed: str) -> list[Kill]:
    """The kills of a run, one after the other."""
    rng, kills = random.Random(seed), []
    for event in rng.sample([*EVENTS], KILLS):
        rank, most = rng.choice([*EVENTS[event].items()])
        kills.append(Kill(event, rank, rng.randint(1, most + most // 2)))
    return kills


class Instants:
    """Counts the events of this rank, and kills it at one of them."""

    def __init__(self, rank: int, kill: Kill, save: Path):
        self.kill, self.save, self.is_hit, self.counts = kill, save, rank == kill.rank, Counter()

    def reach(self, event: str):
        self.counts[event] += 1
        if self.is_hit and (event, self.counts[event]) == (self.kill.event, self.kill.number):
            self.save.with_suffix(".killed").write_text(event)
            os.kill(os.getpid(), signal.SIGKILL)

    def before(self, owner, name: str, event: str):
        """Every call of a method is an event."""
        method = getattr(owner, name)

        def called(*args, **kwargs):
            self.reach(event)
            return method(*args, **kwargs)

        setattr(owner, name, called)

    def on_audit(self, event: str, args):
        """Every change of the run's folder is an event."""
        if event not in ("open", "os.rename", "os.mkdir", "os.remove") or not str(args[0]).startswith(f"{self.save}/"):
            return
        if event != "open" or (isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)):
            self.reach("change of a file")

    def install(self):
        from megarl.comm.announcements import Announcements
        from megarl.rollout.weight_sync import WeightSync
        from megarl.trainers.step_reports import AsyncMetrics

        sys.addaudithook(self.on_audit)
        self.before(schedule.Schedule, "append", "record of the schedule")
        for owner, name in ((Announcements, "send"), (Announcements, "take"), (AsyncMetrics, "publish")):
            self.before(owner, name, "message")
        for name in ("send_copy", "run"):
            self.before(WeightSync, name, "transfer of weights")
        response_log.append = self.append

    def append(self, descriptor: int, record: bytes):
        """Writes a record; an event is in its middle."""
        os.write(descriptor, record[: len(record) // 2])
        self.reach("half a record of the schedule")
        os.write(descriptor, record[len(record) // 2 :])


def generated_through(save: Path) -> int:
    """The last step whose batch the latest checkpoint holds, or has trained on."""
    return waiting_groups.queued(folders.read_manifest(folders.find(str(save), "--load"), "--load"))["through"]


def rounds_of(save: Path) -> dict:
    """The rounds that all replicas have written."""
    return Recording.read(save / schedule.FOLDER, "--save", str(save)).rounds


def load_of(save: Path) -> str:
    """As after a restart: nothing before the first checkpoint."""
    return f" --load {save}" * (save / "checkpoints" / "latest").exists()


def kill_a_run(save: Path, flags: str, function, *args):
    """Runs a function of a rank, which kills one of them."""
    parsed, size = parsed_of(save, TWO, f"{flags} {RECORDED}{load_of(save)}")
    with pytest.raises(RankFailed):  # whichever rank notices first
        run_world(function, size, parsed, save, *args)


def killed(rank: int, parsed, save: Path, kill: Kill, seed: int):
    """Runs a program, with a seed for its clock, until the kill."""
    Instants(rank, kill, save).install()
    clocked(rank, parsed, seed, seed)


def killed_at_a_line(rank: int, parsed, save: Path, replica: int, seed: int):
    """Runs a program until a replica is about to write its line of HALF, and the other one has written its own."""
    append, other = schedule.Schedule.append, save / schedule.FOLDER / f"replica_{1 - replica:05d}.log"

    def appended(self, record, of_replica, replicas):
        if (record.round[0], of_replica) == (HALF, replica):
            assert wait_until(lambda: f'"step": {HALF},'.encode() in other.read_bytes())
            os.kill(os.getpid(), signal.SIGKILL)
        append(self, record, of_replica, replicas)

    schedule.Schedule.append = appended
    clocked(rank, parsed, seed, seed)


@pytest.mark.nightly
@pytest.mark.parametrize("name", RUNS_TO_KILL)
def test_a_run_that_is_killed_at_random_instants_has_the_bytes_of_its_schedule(name, tmp_path):
    """Five random kills each, one after the other; each start has another clock, so what it does not follow differs."""
    save, mark, flags = tmp_path / "run", tmp_path / "run.killed", f"{RUNS[name][0]} {FLAGS}"
    kill_a_run(save, flags, killed_at_a_line, 0, 0)
    assert max(rounds_of(save))[0] == HALF - 1 > generated_through(save)  # the next start follows what is later
    for seed, kill in enumerate(plan(name), 1):
        known = rounds_of(save)
        kill_a_run(save, flags, killed, kill, seed)
        assert mark.read_text() == kill.event and known.items() <= rounds_of(save).items(), kill
        mark.unlink()
    known = rounds_of(save)
    run(save, TWO, f"{flags} {RECORDED}{load_of(save)}", seed=KILLS + 1)
    found = rounds_of(save)
    assert known.items() <= found.items() and {step for step, _ in found} == {*range(1, STEPS + 1)}
    places = [(each["step"], each["round"], each["replica"]) for each in records_of(save)]
    assert sorted(places) == [(*number, replica) for number in sorted(found) for replica in (0, 1)]
    assert_same(run(tmp_path / "replay", ONE, f"{flags} --replay-schedule {save}"), save, STEPS)
