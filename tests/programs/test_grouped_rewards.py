"""Rewards of whole groups: all responses to a prompt in one call, in order, in every layout and kind of sampling."""

import json
from pathlib import Path

import pytest

from megarl.rewards import Score, grouped
from tests.helpers.evaluation import evaluate_argv, run_evaluate
from tests.helpers.programs import assert_close, metrics, rl_argv, samples, train
from tests.helpers.tiers import by_default

NAME = "tests.programs.test_grouped_rewards:novelty"
SAMPLES = 4
# One mini-batch: without the reward, its responses would be assigned to replicas one by one.
FLAGS = (
    f"--advantage grpo --kl-coefficient 0 --lr 1e-4 --samples-per-prompt {SAMPLES} --minibatch-size 24 --ppo-epochs 1"
)
WEIGHTED = f"{FLAGS} --train-iters 2 --reward 0.5*{NAME}+0.25*exact-match"


@grouped
def novelty(samples) -> list:
    """Which responses the group has not had before, and how many came before: it depends on order and completeness."""
    assert len({sample.prompt for sample in samples}) == 1, "of several prompts"
    texts = [sample.response for sample in samples]
    assert not any(text.startswith("0") for text in texts), "a response that no group may have"
    scores = expected(texts)
    return scores if len(samples) % 2 else [Score(score, score >= 1.0) for score in scores]


def expected(texts: list[str]) -> list[float]:
    return [(text not in texts[:i]) + i / 10 + len(texts) / 100 for i, text in enumerate(texts)]


def groups_of(rows: list[dict], size: int = SAMPLES) -> list[list[dict]]:
    assert [row["sequence"] for row in rows] == list(range(len(rows))) and rows and len(rows) % size == 0
    return [rows[i : i + size] for i in range(0, len(rows), size)]


def check(rows: list[dict], size: int = SAMPLES) -> int:
    """Every group was scored as a whole, or failed as a whole; how many failed."""
    failed = 0
    for group in groups_of(rows, size):
        texts = [row["turns"][-1]["text"] if "turns" in row else row["response"] for row in group]
        if any(text.startswith("0") for text in texts):
            assert all("a response that no group may have" in row["failure"] for row in group)
            failed += 1
        else:
            assert [row["reward_values"][NAME] for row in group] == expected(texts) and "failure" not in group[0]
    return failed


def rows_of(save: Path, step: int) -> list[dict]:
    return [json.loads(line) for line in samples(save, step).splitlines()]


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    """The run of one rank."""
    save = tmp_path_factory.mktemp("grouped") / "run"
    train("rl", rl_argv(save, WEIGHTED))
    return save


LAYOUTS = {
    "two replicas": (2, ""),
    "four replicas": (4, ""),
    "more replicas than the actor": (3, "--role-map actor=0;reward=0-2"),
    "apart, in workers": (3, "--role-map actor=0;reward=1-2 --reward-workers 1"),
    "TP2 apart": (3, "--role-map actor=0-1;reward=2 --actor-tensor-model-parallel-size 2"),
}  # fmt: skip


def test_a_group_is_scored_or_fails_as_a_whole(alone):
    failed = sum(check(rows_of(alone, step)) for step in (1, 2))
    assert 0 < failed < 12 and metrics(alone)[1]["actor/grad_norm"] > 0
    counted = sum(metrics(alone)[step][f"reward/{NAME}/failures"] for step in (1, 2))
    assert counted == failed * SAMPLES


@pytest.mark.parametrize("layout", by_default(LAYOUTS, ["two replicas"]))
def test_every_layout_scores_the_same(layout, alone, tmp_path):
    size, flags = LAYOUTS[layout]
    train("rl", rl_argv(tmp_path / "run", f"{WEIGHTED} {flags}"), size)
    assert samples(tmp_path / "run", 1) == samples(alone, 1)
    names = ["reward/mean", "reward/std", "actor/loss", "actor/grad_norm", f"reward/{NAME}/mean"]
    for step in (1, 2):
        assert_close(metrics(tmp_path / "run")[step], metrics(alone)[step], names, 1e-5)


SAMPLING = {
    "filter": "--group-filter reward --dynamic-sampling --max-sampling-rounds 3 --reward-failure fallback",
    "partial rollouts": "--over-sampling 2 --partial-rollouts --rollout-correction tis",
    "greedy baseline": "--advantage remax --greedy-baseline",
    "environment": "--environment tests.helpers.sum_environments:Sums --max-turns 3 --max-turn-length 4"
    " --max-response-length 18 --max-tokens-per-microbatch 100 --environment-timeout 60",
    "a lag": "--role-map actor=0;reward=1-2;rollout=1-2 --generation-lag 1 --rollout-correction tis",
    "one sample": "--samples-per-prompt 1 --minibatch-size 6 --advantage reinforce++",
}


@pytest.mark.parametrize("kind", by_default(SAMPLING, ("filter", "partial rollouts")))
def test_every_kind_of_sampling_gives_whole_groups(kind, tmp_path):
    train(
        "rl",
        rl_argv(tmp_path / "run", f"{FLAGS} --train-iters 2 --reward {NAME} {SAMPLING[kind]}"),
        3 if kind == "a lag" else 2,
    )
    size = 1 if kind == "one sample" else SAMPLES
    assert all(check(rows_of(tmp_path / "run", step), size) < 6 for step in (1, 2))
    assert metrics(tmp_path / "run")[1]["actor/grad_norm"] > 0


def test_the_samples_of_a_held_out_prompt_are_a_group(tmp_path):
    flags = f"--reward {NAME} --eval-responses 3 --eval-temperature 1 --eval-samples 5"
    found = []
    for size in (1, 2):
        run_evaluate(evaluate_argv(tmp_path / str(size), flags), size)
        found.append((tmp_path / str(size) / "samples.jsonl").read_bytes())
    assert found[0] == found[1] and check([json.loads(line) for line in found[0].splitlines()], 3) < 5
