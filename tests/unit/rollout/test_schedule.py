"""The files of a recorded schedule: what is left of a writer that was killed at any instant."""

import contextlib
import os
import sys
from pathlib import Path

import pytest

from megarl.rollout import response_log
from megarl.rollout.schedule import Recording, RoundRecord, Schedule
from tests.helpers.rollout.recorded_runs import facts_of

RUN, REPLICAS, ROUNDS = {"seed": 5, "data": {}, "settings": {}}, 2, 4
CHANGES = ("open", "os.mkdir")


class Killed(BaseException):
    """Stands for the death of the process."""


def record_of(step: int, attempt: int) -> RoundRecord:
    """The same round and the same weights in all attempts, other segments."""
    return RoundRecord((step, 0), step - 1, step - 1, None, {7: [(step - 1, attempt)]})


def begun(folder: Path) -> tuple[Schedule, Recording]:
    """The schedule of a run that goes on after a checkpoint, and what it follows."""
    recording = Recording.read(folder, "--save", str(folder)) if folder.exists() else Recording("", {}, {})
    return Schedule(recording, 0, folder, RUN), recording


def segments_of(folder: Path) -> dict[int, dict]:
    """By step, of the rounds that all replicas have written."""
    return {record.round[0]: record.segments for record in begun(folder)[1].rounds.values()}


def steps_in(file: Path) -> list[int]:
    return [facts["step"] for facts in facts_of(file) if "step" in facts]


class Death:
    """Raises before the number-th change of the folder, as an audit hook, and within a record."""

    def __init__(self, folder: Path):
        self.folder, self.left = str(folder), None

    def __call__(self, event, args):
        if self.left is None or event not in CHANGES or not str(args[0]).startswith(self.folder):
            return
        if event != "open" or args[2] & (os.O_WRONLY | os.O_RDWR):
            self.count()

    def count(self):
        self.left -= 1
        if self.left < 0:
            raise Killed

    def append(self, descriptor: int, record: bytes):
        self.count()
        os.write(descriptor, record[: len(record) // 2])
        self.count()
        os.write(descriptor, record[len(record) // 2 :])


def test_a_writer_that_is_killed_at_any_instant_loses_no_line_and_doubles_none(tmp_path, monkeypatch):
    """Killed twice: at each of its changes, and then at one of those of the next attempt."""
    death = Death(tmp_path)
    sys.addaudithook(death)
    monkeypatch.setattr(response_log, "append", death.append)
    deaths = 0
    for number in range(100):
        folder, kept = tmp_path / str(number), {}
        for attempt, left in enumerate((number, number * 7 % 11, 1000)):
            one = begun(folder)[0]
            death.left = left
            with contextlib.suppress(Killed):
                if len(kept) < ROUNDS:
                    one.open(0)
                for step in range(len(kept) + 1, ROUNDS + 1):
                    one.append(record_of(step, attempt + 1), 0, 1)
            has_died, death.left = death.left < 0, None
            deaths += has_died
            before, kept = kept, segments_of(folder)
            assert before.items() <= kept.items()
            if not attempt and not has_died:
                assert number > 2 * ROUNDS and deaths > 1.5 * number
                return
        assert [*kept] == steps_in(folder / "replica_00000.log") == [*range(1, ROUNDS + 1)]


@pytest.mark.parametrize("first", [0, 1])
def test_lines_of_two_attempts_are_no_round(first, tmp_path):
    """The first attempt is killed when one replica has written its line, the second when only the other one has."""
    for attempt, replica in ((1, first), (2, 1 - first)):
        schedules = [begun(tmp_path)[0] for _ in range(REPLICAS)]
        for number, one in enumerate(schedules):
            one.open(number)
        schedules[replica].append(record_of(1, attempt), replica, REPLICAS)
        assert segments_of(tmp_path) == {}
    assert sum(len(steps_in(file)) for file in tmp_path.iterdir()) == 1
