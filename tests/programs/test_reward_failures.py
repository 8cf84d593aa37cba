"""Responses whose verifier failed: dropped from groups, losses and means, in every layout, and never silently."""

import asyncio
import os
import sys
from statistics import fmean

import pytest
import torch

from tests.helpers.programs import metrics, rl_argv, rows_of, timeless_rows, train
from tests.helpers.tiers import long

NAME = "tests.programs.test_reward_failures:picky"
FLAGS = f"--reward {NAME} --reward-max-failures 1 --train-iters 2"
GROUPS = f"{FLAGS} --samples-per-prompt 4"


def picky(sample) -> float:
    """Cannot score what begins with one of two digits."""
    if sample.response[:1] in set("26"):
        raise ValueError("a bad digit")
    return len(sample.response) / 10


async def silent(sample) -> float | None:
    """Is awaited, and judges all but what `picky` cannot score."""
    await asyncio.sleep(0)
    return None if sample.response[:1] in set("26") else len(sample.response) / 10


def rude(sample) -> float:
    """Scores as `picky`, with gradients off and a stdout that is closed."""
    torch.set_grad_enabled(False)
    sys.stdout = open(os.devnull, "w")
    sys.stdout.close()
    return picky(sample)


@pytest.fixture(scope="module")
def dropped(tmp_path_factory):
    """A PPO run, and what it printed to standard output."""
    save = tmp_path_factory.mktemp("runs") / "ppo"
    (out,) = train("rl", rl_argv(save, FLAGS))
    return save, out


def test_what_failed_counts_nowhere_and_is_said(dropped):
    save, out = dropped
    rows, found = rows_of(save), metrics(save)[1]
    failed = [row for row in rows if "failure" in row]
    scored = [row for row in rows if "failure" not in row]
    assert failed and scored and all(row["response"][:1] in set("26") for row in failed)
    place = f"ValueError: a bad digit ({__file__}:{picky.__code__.co_firstlineno + 3}); the response was "
    assert all(place + repr(row["response"]) in row["failure"] for row in failed)
    assert found[f"reward/{NAME}/failures"] == len(failed)
    for name in ("reward/mean", f"reward/{NAME}/mean"):
        assert found[name] == pytest.approx(fmean(row["reward"] for row in scored), abs=1e-6)
    assert found["rollout/response_length_mean"] == pytest.approx(fmean(row["length"] for row in scored))
    assert f" | {len(failed)} failed | " in out


def test_a_lone_reward_of_none_is_dropped_as_a_failure_and_beside_others_adds_nothing(dropped, tmp_path):
    """In training the response is no wrong answer: the run is that of a reward that raises for these."""
    name = NAME.replace("picky", "silent")
    train("rl", rl_argv(tmp_path / "lone", FLAGS.replace(NAME, name)))
    failed = [row for row in rows_of(tmp_path / "lone") if "failure" in row]
    assert failed and all("returned None, and no other term" in row["failure"] for row in failed)
    rows = [{key.replace(name, NAME): value for key, value in row.items()}
            for row in timeless_rows(tmp_path / "lone", (1, 2)).values()]  # fmt: skip
    assert rows == list(timeless_rows(dropped[0], (1, 2)).values()) and rows[0]["actor/grad_norm"] > 0
    several = f"--reward {name}+0.5*length --reward-length 2 --samples-per-prompt 4 --advantage gdpo --kl-coefficient 0"
    train("rl", rl_argv(tmp_path / "several", f"{several} --train-iters 1"))
    rows, found = rows_of(tmp_path / "several"), metrics(tmp_path / "several")[1]
    silent_rows = [row for row in rows if row["response"][:1] in set("26")]
    assert silent_rows and not any("failure" in row for row in rows)
    assert all(row["reward"] == row["reward_parts"]["length"] for row in silent_rows)
    assert all(row["reward_values"][name] is None for row in silent_rows)
    known = [row["reward_values"][name] for row in rows if row not in silent_rows]
    assert found[f"reward/{name}/mean"] == pytest.approx(fmean(known), abs=1e-6)
    assert found[f"reward/{name}/failures"] == 0 and found["actor/grad_norm"] > 0


def test_a_reward_that_changes_the_process_trains_the_same(dropped, tmp_path, capfd):
    save, out = dropped
    name = NAME.replace("picky", "rude")
    (said,) = train("rl", rl_argv(tmp_path / "rude", FLAGS.replace(NAME, name)))
    assert f"--reward {name} changed sys.stdout, whether torch computes gradients; " in capfd.readouterr().err
    assert said.count("\nstep ") == out.count("\nstep ") == 2
    rows = [{key.replace(name, NAME): value for key, value in row.items()}
            for row in timeless_rows(tmp_path / "rude", (1, 2)).values()]  # fmt: skip
    assert rows == list(timeless_rows(save, (1, 2)).values()) and rows[0]["actor/grad_norm"] > 0


def test_a_fallback_counts_and_another_value_is_another_run(dropped, tmp_path):
    found = {}
    for value in (0, 1):
        save = tmp_path / str(value)
        train("rl", rl_argv(save, f"{FLAGS} --reward-failure fallback --reward-fallback {value} --train-iters 1"))
        found[value] = metrics(save)[1]
        rows = rows_of(save)
        assert {row["reward"] for row in rows if "failure" in row} == {float(value)}
        assert found[value]["reward/mean"] == pytest.approx(fmean(row["reward"] for row in rows), abs=1e-6)
    losses = {found[0]["critic/loss"], found[1]["critic/loss"], metrics(dropped[0])[1]["critic/loss"]}
    assert len(losses) == 3


@pytest.mark.parametrize("flags", [
    "--advantage grpo --group-filter reward", long("--advantage grpo"), long("--advantage remax --greedy-baseline"),
])  # fmt: skip
def test_groups_are_made_of_what_has_a_score(flags, tmp_path):
    (out,) = train("rl", rl_argv(tmp_path / "run", f"{GROUPS} {flags}"))
    found, rows = metrics(tmp_path / "run")[1], rows_of(tmp_path / "run")
    assert any("failure" in row for row in rows) and "failed" in out
    assert found["actor/grad_norm"] > 0
