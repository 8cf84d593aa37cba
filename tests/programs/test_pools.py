"""Difficulty pools in runs: the same prompts in every layout, byte-identical resume, groups outside a range."""

import json
from pathlib import Path

import pytest

from tests.helpers.forked_programs import refusal
from tests.helpers.programs import addition, metrics, rl_argv, samples, train, write_lines
from tests.helpers.tiers import by_default
from tools import _metric_catalog as metric_catalog

# The pool of a prompt depends on whether the end token comes early, which the warm start does now and then.
FLAGS = (
    "--advantage grpo --kl-coefficient 0 --lr 1e-4 --prompts-per-step 4 --minibatch-size 8 --ppo-epochs 1"
    " --pool-bounds 0.3,0.7 --pool-weights 0.5,1,0 --pool-retire-after 3 --max-response-length 3"
    " --reward tests.programs.test_pools:is_even"
)
STEPS = 8


def is_even(sample) -> float:
    """1 if the first digit of the response is even."""
    return float(sample.response[:1] in ("0", "2", "4", "6", "8"))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Path:
    """Few prompts, so that a run has several epochs."""
    return write_lines(tmp_path_factory.mktemp("pools") / "few.jsonl", [addition(n, 3) for n in range(4, 15)])


def argv(save: Path, prompts: Path, flags: str = "") -> list[str]:
    return rl_argv(save, f"{FLAGS} --prompts {prompts} --train-iters {STEPS} {flags}")


def rows_of(save: Path, step: int) -> list[dict]:
    return [json.loads(line) for line in samples(save, step).splitlines()]


@pytest.fixture(scope="module")
def whole(prompts, tmp_path_factory) -> Path:
    """The run of one rank, with a checkpoint in the middle."""
    save = tmp_path_factory.mktemp("whole") / "run"
    train("rl", argv(save, prompts, "--save-interval 5"))
    return save


def test_prompts_are_drawn_by_their_latest_groups(whole):
    latest, in_a_row, drawn = {}, {}, []
    for step in range(1, STEPS + 1):
        rows, row = rows_of(whole, step), metrics(whole)[step]
        groups = [rows[i : i + 2] for i in range(0, len(rows), 2)]
        for prompt in {group[0]["prompt"] for group in groups}:
            assert latest.get(prompt, 0.5) < 0.7 and in_a_row.get(prompt, 0) < 3  # neither easy nor retired
            drawn.append(prompt)
        for group in groups:
            share = sum(each["correct"] for each in group) / 2
            latest[group[0]["prompt"]] = share
            in_a_row[group[0]["prompt"]] = in_a_row.get(group[0]["prompt"], 0) + 1 if share <= 0.3 else 0
        retired = [prompt for prompt in latest if in_a_row[prompt] >= 3]
        counts = {
            "easy": sum(share >= 0.7 for share in latest.values()), "retired": len(retired),
            "hard": sum(share <= 0.3 for prompt, share in latest.items() if prompt not in retired),
            "unseen": 11 - len(latest),
        }  # fmt: skip
        assert {name: row[f"pools/{name}_fraction"] for name in counts} == {n: c / 11 for n, c in counts.items()}
    assert counts["easy"] and counts["hard"] + counts["retired"] and max(map(drawn.count, drawn)) > 2


LAYOUTS = {
    "two replicas": (2, ""), "four replicas": (4, ""), "TP2": (2, "--tensor-model-parallel-size 2"),
    "apart": (3, "--role-map actor=0;reward=1;rollout=2"),
}  # fmt: skip


@pytest.mark.parametrize("layout", by_default(LAYOUTS, ["two replicas"]))
def test_every_layout_draws_the_same_prompts(layout, whole, prompts, tmp_path):
    size, flags = LAYOUTS[layout]
    train("rl", argv(tmp_path, prompts, flags), size)
    for step in range(1, STEPS + 1):
        assert samples(tmp_path, step) == samples(whole, step)


KINDS = {
    "plain": "",
    "another layout": "",
    "partial rollouts": "--over-sampling 1.5 --partial-rollouts --rollout-correction tis",
    "a filter": "--group-filter range --group-filter-range 0.4,0.6 --dynamic-sampling --max-sampling-rounds 2"
    " --pool-weights 0.5,1,0.5 --pool-retire-after 0",
    "a lag": "--role-map actor=0;reward=1;rollout=1 --generation-lag 1 --rollout-correction tis",
}  # fmt: skip


@pytest.mark.parametrize("kind", by_default(KINDS, ["plain"]))
def test_a_resumed_run_is_the_uninterrupted_one(kind, whole, prompts, tmp_path):
    size = 2 if kind == "a lag" else 1
    if KINDS[kind]:
        whole = tmp_path / "whole"
        train("rl", argv(whole, prompts, f"{KINDS[kind]} --save-interval 5"), size)
    middle = whole / "checkpoints" / "step_00000005"
    train(
        "rl",
        argv(tmp_path / "part", prompts, f"{KINDS[kind]} --load {middle}"),
        2 if kind == "another layout" else size,
    )
    for step in range(6, STEPS + 1):
        assert samples(tmp_path / "part", step) == samples(whole, step)
        one, other = (metrics(run)[step] for run in (tmp_path / "part", whole))
        assert kind == "another layout" or metric_catalog.reproducible(one) == metric_catalog.reproducible(other)


@pytest.mark.long
def test_only_groups_within_the_range_are_trained_on(prompts, tmp_path):
    flags = "--group-filter range --group-filter-range 0.4,0.6"
    train("rl", argv(tmp_path, prompts, flags))
    rows = [row for step in range(1, STEPS + 1) for row in rows_of(tmp_path, step)]
    groups = [rows[i : i + 2] for i in range(0, len(rows), 2)]
    assert {group[0]["kept"] for group in groups} == {True, False}
    assert all(group[0]["kept"] == (sum(row["reward"] for row in group) == 1.0) for group in groups)


@pytest.mark.long
def test_a_run_ends_when_every_prompt_is_solved(prompts, tmp_path):
    from tests.helpers.worlds import RankFailed

    flags = f"{FLAGS} --prompts {prompts} --train-iters {STEPS} --reward length --pool-bounds 0,0.5"
    with pytest.raises(RankFailed, match="no prompt is left to draw"):
        train("rl", rl_argv(tmp_path, flags))


def test_the_reward_must_not_share_ranks_with_training_ahead(prompts, tmp_path):
    flags = "--role-map actor=0;reward=0;rollout=1 --generation-lag 1 --rollout-correction tis"
    assert "--generation-lag 1: --pool-bounds needs the scores of a batch" in refusal(
        argv(tmp_path / "run", prompts, flags), size=2
    )
