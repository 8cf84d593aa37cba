"""Rollouts that a run has saved: a step that is trained on them again is the same step, to the bit."""

import functools
import json
from pathlib import Path

import pytest

from tests.helpers.checkpoints import WAITING
from tests.helpers.programs import GRADED, PLACED, assert_close, metrics, rl_argv, samples, timeless, train

STEPS = "--train-iters 3 --save-interval 1 --lr-decay-iters 9"
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32"
AHEAD = "--role-map actor=0;critic=0;reward=1;reference=1;rollout=1 --rollout-correction tis --one-step-off"
COARSE = "--reward tests.helpers.programs:coarse_reward"
RUNS = {  # ranks, flags
    "ppo": (1, GRADED),
    "ahead with experts": (2, f"{GRADED} {AHEAD} {EXPERTS} --router-replay rollout"),
    "waiting and partial": (2, f"{WAITING} --rollout-max-requests 4"),
    "baselines and filter": (1, f"--advantage remax --greedy-baseline --group-filter reward {COARSE}"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("rollouts")


@functools.cache
def saved(folder: Path, name: str) -> Path:
    """A run that keeps its rollouts and a checkpoint of each step."""
    size, flags = RUNS[name]
    save = folder / name.replace(" ", "-")
    train("rl", rl_argv(save, f"{STEPS} {flags} --save-rollouts", "experts" not in name), size)
    return save


def repeat(save: Path, run: Path, name: str, flags: str = "", size: int | None = None) -> Path:
    """Trains steps 2 and 3 of a run again from its first checkpoint."""
    start = f"--load {run}/checkpoints/step_00000001 --load-rollouts {run} --debug-train-only"
    argv = rl_argv(save, f"{STEPS} {RUNS[name][1]} {start} {flags}", "experts" not in name)
    train("rl", argv, size or RUNS[name][0])
    return save


def weights(run: Path, step: int) -> dict:
    """Name -> SHA-256 of the files with the weights and optimizers of a checkpoint."""
    manifest = json.loads((run / "checkpoints" / f"step_{step:08d}" / "manifest.json").read_text())
    return {name: seal["sha256"] for name, seal in manifest["files"].items() if name.endswith(".distcp")}


def comparable(row: dict) -> dict:
    """A step's metrics without times, and without those of weights that are sent to an engine."""
    return {name: value for name, value in timeless(row).items() if not name.startswith("weights/")}


@pytest.mark.parametrize("name", RUNS)
def test_a_step_that_is_repeated_has_the_same_bits(name, folder):
    run = saved(folder, name)
    again = repeat(folder / f"{run.name}-again", run, name)
    before, after = metrics(run), metrics(again)
    assert list(after) == [2, 3]
    for step in (2, 3):
        assert comparable(after[step]) == comparable(before[step])
        assert samples(again, step) == samples(run, step)
        assert weights(again, step) == weights(run, step)
    assert weights(run, 3) != weights(run, 1)
