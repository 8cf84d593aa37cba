"""The files of a recorded schedule: what is left of a writer that was killed at any instant."""

import contextlib
import functools
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest

from megarl.errors import UsageError
from megarl.rollout import response_log
from megarl.rollout.schedule import Recording, RoundRecord, Schedule
from megarl.trainers.rl_trainer import RLInputs
from tests.helpers import faults
from tests.helpers.programs import in_world, inputs, metrics, samples, timeless
from tests.helpers.rollout import seeded_clock
from tests.helpers.rollout.recorded_runs import (
    GRPO,
    ONE,
    RECORDED,
    RUNS,
    SAVED,
    STEPS,
    TWO,
    assert_same,
    clocked,
    facts_of,
    parsed_of,
    records_of,
    run,
)
from tests.helpers.tiers import by_default, long
from tests.helpers.waiting import wait_until
from tests.helpers.worlds import RankFailed, run_world

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


REPLAYS = [(name, number) for name, (*_, replays) in RUNS.items() for number in range(len(replays))]


@functools.cache
def recording(folder: Path, name: str) -> Path:
    flags, roles, _ = RUNS[name]
    # Weights of a step without a batch never come: no seed says when a replica no longer waits for them.
    seed = seeded_clock.NEVER if name == "steps without a batch" else 1
    return run(folder / name.replace(" ", "-"), roles, f"{flags} {RECORDED}", seed, 1)


# -- replays -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, number", by_default(REPLAYS, [("two replicas", 0)]))
def test_a_replay_has_the_bytes_of_the_recording(name, number, folder, tmp_path):
    recorded, (flags, _, replays) = recording(folder, name), RUNS[name]
    rows = metrics(recorded)
    with_batch = [row for row in rows.values() if "rollout/staleness" in row]
    # With a filter the clock, which decides about groups, may leave a step without a batch in other runs, too.
    assert len(with_batch) < STEPS or name != "steps without a batch"
    mixed = max(row["rollout/mixed_version_fraction"] for row in with_batch)
    assert mixed == 0 if name in ("turns", "steps without a batch") else mixed > 0
    assert len({row["rollout/staleness"] for row in with_batch}) > 1
    assert all(row["rollout/staleness_max"] <= 2 or "filter" in flags or "partial" in flags for row in with_batch)
    roles, more = replays[number]
    replay = run(tmp_path / "replay", roles, f"{flags} {more} --replay-schedule {recorded}", sleeps=7 + number)
    assert_same(replay, recorded)
    assert not (replay / "schedule").exists()


def test_staleness_is_that_of_the_recorded_weights(folder):
    ages: dict[int, list[int]] = {step: [] for step in range(1, STEPS + 1)}
    for each in records_of(recording(folder, "two replicas")):
        for weights, count in (segment for segments in each["segments"].values() for segment in segments):
            ages[each["step"]] += [each["step"] - 1 - weights] * count
    for step, row in metrics(recording(folder, "two replicas")).items():
        assert row["rollout/staleness"] == sum(ages[step]) / len(ages[step])
        assert row["rollout/staleness_max"] == max(ages[step])


# -- restarts ------------------------------------------------------------------------------------------------------


def killed(rank: int, parsed, save: Path):
    """Runs a program until the second replica is about to write its record of the last step, and the first one has."""
    from megarl.rollout.schedule import Schedule

    append, first = Schedule.append, save / "schedule" / "replica_00000.log"

    def appended(schedule, record, replica, replicas):
        if record.round[0] == STEPS and replica == 1:
            assert wait_until(lambda: f'"step": {STEPS},'.encode() in first.read_bytes())
            os.kill(os.getpid(), signal.SIGKILL)
        append(schedule, record, replica, replicas)

    Schedule.append = appended
    clocked(rank, parsed, 1, 0)


@pytest.mark.long
@pytest.mark.parametrize("roles", [TWO, ONE])
def test_a_killed_run_follows_its_own_lines(roles, folder, tmp_path):
    save, flags = tmp_path / "run", f"{RUNS['two replicas'][0]} {RECORDED}"
    parsed, size = parsed_of(save, TWO, f"{flags} --train-iters {STEPS} --save-interval 2")
    with pytest.raises(RankFailed):  # whichever rank notices first
        run_world(killed, size, parsed, save)
    before = {(each["step"], each["replica"]): each for each in records_of(save)}
    assert (STEPS, 0) in before and (STEPS, 1) not in before
    shutil.copytree(save, tmp_path / "copy")
    (latest,) = (int((save / "checkpoints" / "latest").read_text()[5:]),)
    assert latest < STEPS - 2
    run(save, roles, f"{flags} --save-interval 2 --load {save}", seed=9)
    after = {(each["step"], each["replica"]): each for each in records_of(save)}
    assert all(after[key] == each for key, each in before.items() if key[0] < STEPS)
    assert len(after) == 2 * STEPS if roles == TWO else (STEPS, 0) in after
    of_before = metrics(tmp_path / "copy")
    assert all(timeless(metrics(save)[step]) == timeless(row) for step, row in of_before.items())
    whole = shutil.copytree(save, tmp_path / "whole")
    if roles == ONE:  # another branch from an earlier checkpoint follows all lines, and adds none
        run(save, TWO, f"{flags} --save-interval 2 --load {save}/checkpoints/step_00000002")
        assert_same(save, whole)
        assert records_of(save) == records_of(whole)
    flags = RUNS["two replicas"][0]
    assert_same(run(tmp_path / "replay", ONE, f"{flags} --save-interval 2 --replay-schedule {save}"), whole)


def test_a_run_that_follows_a_schedule_ends_where_no_round_waits(folder, tmp_path):
    """A signal in step 1: rounds up to step 3 wait for weights that the schedule names."""
    from megarl.rollout.schedule import Recording

    recorded = recording(folder, "two replicas")
    rounds = Recording.read(recorded / "schedule", "", "").rounds
    needed = {step: max(rounds[i, 0].last for i in range(1, step + 3)) for step in range(1, STEPS - 1)}
    end = next(step for step in needed if needed[step] <= step)
    assert end > 1
    parsed, size = parsed_of(tmp_path, ONE, f"{RUNS['two replicas'][0]} --replay-schedule {recorded}")
    run_world(faults.stopped_in_update, size, parsed, 1)
    assert sorted(metrics(tmp_path)) == list(range(1, end + 1))
    for step in range(1, end + 1):
        assert samples(tmp_path, step) == samples(recorded, step)
    assert (tmp_path / "checkpoints" / f"step_{end:08d}").is_dir()


@pytest.mark.long
def test_saved_rollouts_of_a_recording_are_trained_on_alone(tmp_path):
    flags = f"{GRPO} --over-sampling 1.5"
    recorded = run(tmp_path / "recorded", TWO, f"{flags} {RECORDED} --save-rollouts", seed=1)
    alone = f"{flags} {RECORDED} --debug-train-only --load-rollouts {recorded}"
    assert_same(run(tmp_path / "alone", TWO, alone), recorded)
    assert not (tmp_path / "alone" / "schedule").exists()


# -- wrong input ---------------------------------------------------------------------------------------------------


def ends_of(file: Path) -> list[int]:
    """Where the records of a log end."""
    return [entry.end for entry in response_log.intact(file, print)]


def flip(file: Path):
    """Changes a byte of the last round."""
    data = bytearray(file.read_bytes())
    data[-99] ^= 1
    file.write_bytes(data)


def forget_a_round(file: Path):
    """Removes a record from the middle."""
    data, ends = file.read_bytes(), ends_of(file)
    file.write_bytes(data[: ends[1]] + data[ends[2] :])


DAMAGE = {
    "a byte": flip, "other text": lambda file: file.write_text("no log, but a text"),
    "a lost round": lambda file: os.truncate(file, ends_of(file)[-2]),
    "a cut round": lambda file: os.truncate(file, ends_of(file)[-1] - 9), "a lost round within": forget_a_round,
    "other facts": lambda file: file.write_bytes(response_log.packed({"step": 1}, {})),
}  # fmt: skip
REFUSED = [  # damage, other flags, message after the flag and the folder
    ("a byte", "", "its checksum is wrong"),
    ("a lost round within", "", "the schedule has no step 2, but steps 1 to 7"),
    ("other text", "", "the record at byte 0 is damaged"),
    ("other facts", "", "is damaged (it is not what megarl writes)"),
    ("a lost round", "", "the schedule has no step 7, but steps 1 to 6; this run follows it from step 1 to 7"),
    ("a cut round", "", "the schedule has no step 7"),
    ("", "--train-iters 8", "the schedule has no step 8"),
    ("", "--train-iters 6", None),
    ("", "--seed 6", "was recorded with --seed 5; this run has 6"),
    ("", "--lr 2e-4", "was recorded with other settings: --actor-lr 0.0002 (before: 0.0001)"),
    ("", "--generation-lag 3", "was recorded with other settings: --generation-lag 3 (before: 2)"),
    ("", "--prompts heldout", "was recorded with another --prompts"),
    ("", "--save-interval 1", "and this run meets for an evaluation or a checkpoint"),
]  # fmt: skip


@pytest.mark.parametrize("damage, more, message", REFUSED)
def test_a_schedule_that_cannot_be_followed_is_wrong_input(damage, more, message, folder, tmp_path):
    recorded, flags = recording(folder, "two replicas"), RUNS["two replicas"][0]
    shutil.copytree(recorded / "schedule", tmp_path / "schedule")
    if damage:
        DAMAGE[damage](tmp_path / "schedule" / "replica_00001.log")
    more = more.replace("heldout", str(inputs() / "heldout.jsonl"))
    parsed, _ = parsed_of(tmp_path / "run", TWO, f"{flags} --replay-schedule {tmp_path} {more}")
    if message is None:
        RLInputs(parsed)
        return
    with pytest.raises(UsageError) as caught:
        RLInputs(parsed)
    text = str(caught.value)
    assert text.startswith(f"--replay-schedule {tmp_path}") and message in text and "\n" not in text


def refused(rank: int, parsed, file: Path):
    """Runs a program that wrong input ends; the message of the rank that finds it is in a file."""
    try:
        in_world(rank, "rl", parsed)
    except UsageError as error:
        file.write_text(f"{error.reporting_rank} {error}")
        raise


@pytest.mark.parametrize(
    "change, message", [(-1, "has not ended after"), long((1, "ended after|it has other responses"))]
)
def test_other_responses_than_recorded_end_the_run(change, message, folder, tmp_path):
    """Checksums that fit: as if the weights at the start had been others."""
    shutil.copytree(recording(folder, "two replicas") / "schedule", tmp_path / "schedule")
    changes = [change]
    for file in sorted((tmp_path / "schedule").iterdir()):
        found = facts_of(file)
        for facts in found:
            long_ones = [segments[-1] for segments in facts.get("segments", {}).values() if segments[-1][1] > 1]
            if changes and facts.get("step") == 2 and long_ones:
                long_ones[0][1] += changes.pop()
        file.write_bytes(b"".join(response_log.packed(facts, {}) for facts in found))
    assert not changes
    parsed, size = parsed_of(tmp_path / "run", ONE, f"{RUNS['two replicas'][0]} --replay-schedule {tmp_path}")
    with pytest.raises(RankFailed):
        run_world(refused, size, parsed, tmp_path / "message")
    text = (tmp_path / "message").read_text()
    assert re.match(f"1 --replay-schedule {tmp_path}: step 2: .*({message})", text) and "\n" not in text


@pytest.mark.parametrize("more, message", [
    (f"{RECORDED} --temperature 2", "was recorded with other settings: --temperature 2.0 (before: 1.0); move "),
    (f"{RECORDED} --prompts heldout --load-changed-data", "--load-changed-data: the checkpoint of "),
    ("", "--load: the checkpoint holds groups of 2 responses"),
])  # fmt: skip
def test_a_recorded_run_resumes_as_it_was(more, message, folder):
    save, flags = recording(folder, "two replicas"), RUNS["two replicas"][0]
    more = more.replace("heldout", str(inputs() / "heldout.jsonl"))
    parsed, _ = parsed_of(save, TWO, f"{flags} --load {save}/checkpoints/step_{SAVED:08d} {more}")
    with pytest.raises(UsageError) as caught:
        RLInputs(parsed)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_folder_without_a_schedule_is_wrong_input(tmp_path):
    parsed, _ = parsed_of(tmp_path / "run", ONE, f"{GRPO} --replay-schedule {tmp_path}")
    with pytest.raises(UsageError, match="holds no schedule; allowed is the folder of a run with --generation-sched"):
        RLInputs(parsed)
