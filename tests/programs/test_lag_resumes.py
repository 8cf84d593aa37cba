"""Resuming generation ahead with another lag, schedule or layout: what is accepted works, all else is one line."""

import functools
from pathlib import Path

import pytest

from megarl.errors import UsageError
from megarl.trainers.rl_trainer import RLInputs
from tests.helpers.programs import metrics, samples, timeless
from tests.helpers.rollout.recorded_runs import GRPO, ONE, RECORDED, TWO, layout_free, parsed_of, run

LAST, CUT, END = 5, 3, 8  # steps: of the runs that are resumed, of their checkpoint with batches, of those that resume
CARRIED = f"{GRPO} --over-sampling 1.5 --partial-rollouts"
TOGETHER = "actor=0-1;reward=0-1"
SOURCES = {  # role map, flags
    "fixed": (ONE, GRPO),
    "recorded": (ONE, f"{GRPO} {RECORDED}"),
    "in step": (ONE, f"{GRPO} --generation-lag 0"),
    "together": (TOGETHER, f"{GRPO} --generation-lag 0"),
    "carried": (ONE, CARRIED),
    "carried, recorded": (ONE, f"{CARRIED} {RECORDED}"),
}
WAITING = "--load: the checkpoint holds groups of 2 responses that wait for their batch to be full"


pytestmark = pytest.mark.long


def flags_of(name: str, more: str) -> str:
    """The flags of a source, and others, which may name another schedule."""
    flags = SOURCES[name][1]
    flags = flags.replace(RECORDED, "") if "schedule" in more else flags
    return f"{flags} --save-interval {CUT} {more}"


@functools.cache
def source(folder: Path, name: str) -> Path:
    roles = SOURCES[name][0]
    return run(folder / name.replace(" ", "-"), roles, flags_of(name, f"--train-iters {LAST}"), seed=1)


def checkpoint(folder: Path, name: str, step: int) -> Path:
    return source(folder, name) / "checkpoints" / f"step_{step:08d}"


def resumed(folder: Path, name: str, step: int, roles: str, more: str, save: Path) -> Path:
    flags = f"{flags_of(name, more)} --train-iters {END} --load {checkpoint(folder, name, step)}"
    return run(save, roles, flags, seed=2)


FIXED = "--generation-schedule fixed"
ACCEPTED = [  # source, role map, flags: from its last step, whose checkpoint has no batches of later ones
    ("fixed", ONE, "--generation-lag 0"), ("fixed", TWO, "--generation-lag 4"), ("fixed", ONE, RECORDED),
    ("fixed", TWO, f"{RECORDED} --generation-lag 1"), ("fixed", TOGETHER, "--generation-lag 0"),
    ("recorded", ONE, FIXED), ("recorded", TWO, "--generation-lag 3"),
    ("recorded", ONE, f"{FIXED} --generation-lag 0"),
    ("in step", ONE, f"{RECORDED} --generation-lag 2"), ("together", TWO, "--generation-lag 2"),
    ("carried", ONE, "--generation-lag 0"), ("carried", TWO, "--generation-lag 1"), ("carried", ONE, RECORDED),
    ("carried, recorded", TWO, f"{FIXED} --generation-lag 1"),
    ("carried, recorded", ONE, f"{FIXED} --generation-lag 0"),
]  # fmt: skip


def lag_of(name: str, more: str) -> int:
    words = f"--generation-lag 2 {SOURCES[name][1]} {more}".split()
    return int(words[len(words) - words[::-1].index("--generation-lag")])


@pytest.mark.parametrize("name, roles, more", ACCEPTED)
def test_a_run_goes_on_with_another_lag_or_schedule(name, roles, more, folder, tmp_path):
    """The rollout begins with the weights of the checkpoint, and each step has the metrics of one of an undisturbed
    run."""
    save, lag = resumed(folder, name, LAST, roles, more, tmp_path / "run"), lag_of(name, more)
    rows, ages = {step: timeless(row) for step, row in metrics(save).items()}, range(END - LAST)
    assert sorted(rows) == [LAST + 1 + age for age in ages]
    for age in ages:
        row = rows[LAST + 1 + age]
        assert samples(save, LAST + 1 + age) and row["reward/mean"] >= 0 and row["actor/updates"] > 0
        assert row.keys() >= rows[END].keys() - {n for n in rows[END] if "age_" in n or "fresh" in n or "share_" in n}
        if lag and "carried" not in name:
            assert row["rollout/staleness_max"] <= min(lag, age)
            assert RECORDED in flags_of(name, more) or row["rollout/staleness"] == min(lag, age)
        assert row.get("rollout/logprob_gap_max_fresh", 0) == 0
    assert (rows[LAST + 1]["rollout/logprob_gap_max"] == 0) == ("carried" not in name)
    if RECORDED in more:
        replay = more.replace(RECORDED, f"--replay-schedule {save}")
        assert layout_free(resumed(folder, name, LAST, ONE, replay, tmp_path / "replay")) == layout_free(save)


REFUSED = [  # source, role map, flags, message: from a checkpoint with batches of later steps
    ("fixed", ONE, "--generation-lag 0", "--generation-lag 0: the checkpoint of --load"),
    ("fixed", ONE, "--generation-lag 1", "; allowed is --generation-lag 2"),
    ("fixed", TWO, "--generation-lag 3", "; allowed is --generation-lag 2"),
    ("fixed", TOGETHER, "--generation-lag 0", "; allowed is --generation-lag 2"),
    ("fixed", TOGETHER, "", "--generation-lag 2: needs a rollout in --role-map on other ranks than the actor"),
    ("fixed", ONE, RECORDED, WAITING),
    ("recorded", ONE, FIXED, WAITING),
    ("recorded", TWO, "--generation-lag 1", "; allowed is --generation-lag 2"),
    ("carried, recorded", ONE, f"{FIXED} --generation-lag 1", "; allowed is --generation-lag 2"),
]


@pytest.mark.parametrize("name, roles, more, message", REFUSED)
def test_other_batches_than_those_that_wait_are_wrong_input(name, roles, more, message, folder, tmp_path):
    flags = f"{flags_of(name, more)} --train-iters {END} --load {checkpoint(folder, name, CUT)}"
    parsed, _ = parsed_of(tmp_path, roles, flags)
    with pytest.raises(UsageError) as caught:
        RLInputs(parsed)
    assert message in str(caught.value) and "\n" not in str(caught.value)


LAYOUTS = [  # source, role map
    ("fixed", TWO), ("fixed", "actor=1;reward=0;rollout=0"), ("recorded", TWO), ("carried", TWO),
    ("carried, recorded", "actor=2;reward=0-1;rollout=0-1"),
]  # fmt: skip


@pytest.mark.parametrize("name, roles", LAYOUTS)
def test_batches_that_wait_are_trained_on_in_another_layout(name, roles, folder, tmp_path):
    expected, save = source(folder, name), tmp_path / "run"
    flags = f"{flags_of(name, '')} --train-iters {LAST} --load {checkpoint(folder, name, CUT)}"
    run(save, roles, flags, seed=1)
    found, wanted = layout_free(save), layout_free(expected)
    for step in range(CUT + 1, LAST + 1):
        assert found[step] == wanted[step] and samples(save, step) == samples(expected, step)
