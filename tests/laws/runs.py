"""Small runs of features, and what must be equal of two of them."""

import functools
import re
from pathlib import Path

import pytest

from megarl.checkpoint import folders
from tests.helpers.pages.combinations import with_groups_that_fit
from tests.helpers.programs import (
    inputs,
    metrics,
    preference_argv,
    reward_argv,
    rl_argv,
    samples,
    sft_argv,
    timeless,
    train,
)
from tests.laws import files
from tests.laws.features import FEATURES
from tests.laws.features.feature import Feature
from tools import record_runs

# What a layout, a resume or drafts may change without a number of the policy.
OTHERWISE = re.compile(
    "agent/.*|environment/shared_turns|rollout/lead|.*(draft|accept|decode_steps).*|.*mtp_(depth|speed).*"
    "|.*(waiting_share|sync_s|sync_bytes|staged_bytes|reference_bytes|offloaded_bytes)"
)


def argv(feature: Feature, save: Path, more: str = "") -> list[str]:
    """Command line of a feature's run, with a checkpoint of each step."""
    flags = f"--save-interval 1 --lr-decay-iters 9 {feature.flags} --train-iters {feature.steps} {more}"
    flags = files.named(flags, save=save)
    if feature.program == "rl":
        return with_groups_that_fit(rl_argv(save, f"--save-rollouts {flags}", feature.warm_start))
    found = {"sft": sft_argv, "reward": reward_argv, "preference": preference_argv}[feature.program](save, flags)
    found = with_groups_that_fit(found)
    if not feature.warm_start and "--pretrained-checkpoint" in found:
        place = found.index("--pretrained-checkpoint")
        del found[place : place + 2]
    return found


def run(feature: Feature, save: Path, more: str = "", ranks: int = 0) -> Path:
    train(feature.program, argv(feature, save, more), ranks or feature.ranks)
    if feature.check:
        feature.check(save)
    return save


@functools.cache
def whole(name: str) -> Path:
    """A feature's run that nothing disturbs."""
    if FEATURES[name].needs:
        pytest.importorskip(FEATURES[name].needs)
    return run(FEATURES[name], inputs() / "laws-runs" / name.replace(" ", "-").replace(",", ""))


def numbers(save: Path, step: int) -> dict:
    """The metrics of a step without times, and without `OTHERWISE`."""
    return {name: value for name, value in timeless(metrics(save)[step]).items() if not OTHERWISE.fullmatch(name)}


def assert_same_texts(found: Path, expected: Path, steps):
    for step in steps:
        if (expected / "samples").exists():
            assert samples(found, step) == samples(expected, step), step


def assert_same(found: Path, expected: Path, steps, but: str = "$"):
    """Metrics but those of a pattern, and samples of these steps, and the checkpoint of the last one, are equal to the
    bit."""
    assert_same_texts(found, expected, steps)
    for step in steps:
        one, other = (
            {name: value for name, value in numbers(save, step).items() if not re.match(but, name)}
            for save in (found, expected)
        )
        assert one == other
    name = folders.step_folder(expected, steps[-1]).name
    one, other = (record_runs.checkpoints_of(save, name) for save in (found, expected))
    assert one == other and len(one) > 20
