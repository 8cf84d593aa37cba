"""Groups of responses: filters, dynamic sampling over rounds and resumes, greedy baselines, the on-policy shortcut."""

import functools
import json
from pathlib import Path

import pytest

from megarl.rollout.waiting_groups import GROUPS, kept_records
from tests.helpers.programs import (
    addition,
    coarse_reward,
    in_world,
    metrics,
    program,
    rl_argv,
    samples,
    timeless,
    train,
    write_lines,
)
from tests.helpers.tiers import long
from tests.helpers.worlds import RankFailed, run_world

GRPO = "--advantage grpo --kl-coefficient 0 --lr 1e-4 --reward tests.helpers.programs:coarse_reward"
FILTER = f"{GRPO} --group-filter reward"
DYNAMIC = f"{FILTER} --dynamic-sampling"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("groups")


@functools.cache
def run_of(folder: Path, flags: str, size: int = 1, layout: str = "", steps: int = 3) -> Path:
    """Run folder of a few steps."""
    save = folder / f"run{len(list(folder.iterdir()))}"
    train("rl", rl_argv(save, f"--train-iters {steps} --lr-decay-iters 9 {flags} {layout}"), size)
    return save


def groups_of(save: Path, step: int) -> list[list[dict]]:
    """Rows of a step's samples by group, two responses each."""
    rows = [json.loads(line) for line in samples(save, step).splitlines()]
    assert [row["sequence"] for row in rows] == list(range(len(rows)))
    return [rows[i : i + 2] for i in range(0, len(rows), 2)]


# -- filters -----------------------------------------------------------------------------------------------------


def test_a_filter_drops_groups_whose_rewards_are_equal(folder):
    save = run_of(folder, FILTER)
    for step, row in metrics(save).items():
        groups = groups_of(save, step)
        differ = [one["reward"] != other["reward"] for one, other in groups]
        assert [row["kept"] for group in groups for row in group] == [kept for kept in differ for _ in range(2)]
        assert len(groups) == row["sampling/groups"] == 6 and 0 < sum(differ) < 6
        assert row["sampling/kept_fraction"] == sum(differ) / 6 and row["sampling/rounds"] == 1
        assert row["reward/mean"] == 0.5, "one of the two is right in every group that is kept"
        assert row["sampling/reward_mean"] == sum(row["reward"] for group in groups for row in group) / 12
        assert row["rollout/tokens"] == sum(row["length"] for group in groups for row in group)
        assert row["perf/tokens"] < row["rollout/tokens"] + 12 * 6 and "actor/loss" in row


def test_a_step_without_groups_that_differ_trains_nothing(folder):
    """No response is correct, so the correctness of every group is uniform."""
    save = run_of(folder, f"{GRPO} --group-filter correct --reward tests.helpers.programs:never_right")
    rows = metrics(save)
    assert sorted(rows) == [1, 2, 3]
    for row in rows.values():
        assert row["sampling/kept_fraction"] == 0 and row["rollout/tokens"] > 0
        assert [name for name in row if name.startswith("actor/")] == ["actor/updates"] and row["actor/updates"] == 0


# -- dynamic sampling --------------------------------------------------------------------------------------------


def test_dynamic_sampling_fills_the_batch(folder):
    save = run_of(folder, DYNAMIC)
    for step, row in metrics(save).items():
        groups = groups_of(save, step)
        kept = [group for group in groups if group[0]["kept"]]
        assert len(kept) == 6 and len(groups) == row["sampling/groups"] > 6 and row["sampling/rounds"] > 1
        assert all((one["reward"] != other["reward"]) == one["kept"] == other["kept"] for one, other in groups)
        assert row["reward/mean"] == 0.5 and row["sampling/waiting_groups"] == 0
        assert row["sampling/kept_fraction"] == 6 / len(groups)


WAITS = f"{DYNAMIC} --max-sampling-rounds 1 --save-interval 1"


def test_an_unfinished_batch_waits(folder):
    whole = run_of(folder, WAITS, steps=4)
    rows = metrics(whole)
    waiting = [rows[step]["sampling/waiting_groups"] for step in (1, 2, 3, 4)]
    assert 0 < waiting[0] < 6 and "actor/loss" not in rows[1]
    assert any("actor/loss" in row for row in rows.values())
    for step, before in enumerate([0, *waiting[:-1]], start=1):
        assert rows[step]["sampling/groups"] == 6 - before, "as many prompts as groups are missing"
    assert kept_records(whole / "checkpoints" / "step_00000001").entries(GROUPS)


def test_buffered_groups_are_rejected_by_an_incompatible_run(folder):
    start = run_of(folder, WAITS, steps=4) / "checkpoints" / "step_00000001"
    for flags in (GRPO, f"{WAITS} --samples-per-prompt 3"):
        with pytest.raises(RankFailed, match="--load: the checkpoint holds groups of 2 responses that wait"):
            train("rl", rl_argv(folder / "refused", f"--train-iters 4 --lr-decay-iters 9 {flags} --load {start}"))


def test_a_prompt_drawn_twice_in_a_step_gets_new_responses(tmp_path):
    few = write_lines(tmp_path / "few.jsonl", [addition(3, 4), addition(12, 9)])
    train("rl", rl_argv(tmp_path / "run", f"{GRPO} --train-iters 1 --prompts {few}"))
    by_prompt: dict[str, list] = {}
    for group in groups_of(tmp_path / "run", 1):
        by_prompt.setdefault(group[0]["prompt"], []).append([row["response"] for row in group])
    assert len(by_prompt) == 2
    assert all(len({tuple(group) for group in groups}) > 1 for groups in by_prompt.values())


# -- greedy baselines --------------------------------------------------------------------------------------------


def baselines(rank: int, parsed) -> tuple[list, list]:
    """(baseline of each sequence in the step's data, reward of the greedy answer to its prompt) on this rank."""
    from megarl.algorithms.token_sampling import SamplingSettings
    from megarl.observe.timers import Timers
    from megarl.rewards.base import Sample
    from megarl.rollout.requests import PromptRequest, RoundRequests
    from megarl.trainers.rl_trainer import RLTrainer

    run = RLTrainer(parsed, Timers())
    step_batch = run.batcher.generate(next(run.steps()))
    step_batch.dispatch("actor")
    batch, expected = step_batch["actor"], {}
    for line, tokens in enumerate(
        run.inputs.prompt_tokens
    ):  # by the engine itself, past everything that deals prompts out
        requests = RoundRequests([PromptRequest(line, tokens, 1, 4, 0)], 0, 0).build([0])
        (done,) = run.rollout.engine.generate(requests, run.tokenizer.end_ids, SamplingSettings(greedy=True))
        expected[line] = coarse_reward(Sample(run.inputs.prompts[line].prompt, run.tokenizer.decode(done.tokens)))
    return batch.baseline_scores.tolist(), [expected[line] for line in batch.prompt_ids.tolist()]


REMAX = "--advantage remax --greedy-baseline --kl-coefficient 0 --reward tests.helpers.programs:coarse_reward"


@pytest.mark.parametrize("size", [long(1), 2])
def test_a_baseline_is_the_reward_of_the_greedy_answer(size, tmp_path):
    few = write_lines(tmp_path / "few.jsonl", [addition(i, 3) for i in range(1, 9)])
    parsed = program("rl", rl_argv(tmp_path / "run", f"{REMAX} --prompts {few}"), size)
    found = run_world(baselines, size, parsed)
    assert all(one == other for one, other in found)
    assert {value for one, _ in found for value in one} == {0.0, 1.0}


# -- the on-policy shortcut --------------------------------------------------------------------------------------

ONCE = f"{GRPO} --ppo-epochs 1 --minibatch-size 12 --rollout-correction tis --entropy-coefficient 0.01"


def in_world_with_the_pass(rank: int, name: str, parsed):
    from megarl.roles.actor import Actor

    Actor._updates_on_policy = lambda *_: False
    return in_world(rank, name, parsed)


@pytest.mark.parametrize("size, layout", [(1, ""), long((2, "--pipeline-model-parallel-size 2")), long((2, ""))])
def test_without_the_pass_for_old_logprobs_the_result_is_the_same(size, layout, folder):
    save = run_of(folder, ONCE, size, layout)
    other = folder / f"with the pass {size} {layout[:10]}"
    parsed = program("rl", rl_argv(other, f"--train-iters 3 --lr-decay-iters 9 {ONCE} {layout}"), size)
    run_world(in_world_with_the_pass, size, "rl", parsed)
    for step in (1, 2, 3):
        assert samples(save, step) == samples(other, step)
        assert timeless(metrics(save)[step]) == timeless(metrics(other)[step])
        assert "time/actor/logprobs_s" in metrics(other)[step] and "time/actor/logprobs_s" not in metrics(save)[step]
