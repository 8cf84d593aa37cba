"""Groups of responses: filters, dynamic sampling, greedy baselines, the on-policy shortcut, other old log-probs, and
files of a mixture with groups of their own sizes.

That resumes, layouts and all that samples know the sizes is in tests/laws."""

import functools
import itertools
import math
from pathlib import Path

import pytest

from megarl.rollout.waiting_groups import GROUPS, kept_records
from tests.helpers.programs import (
    GRADED,
    addition,
    coarse_reward,
    in_world,
    inputs,
    metrics,
    program,
    rl_argv,
    rows_of,
    samples,
    timeless,
    train,
    write_lines,
)
from tests.helpers.tiers import by_default, long
from tests.helpers.worlds import RankFailed, run_world
from tools import _metric_catalog as metric_catalog

GRPO = "--advantage grpo --kl-coefficient 0 --lr 1e-4 --reward tests.helpers.programs:coarse_reward"
FILTER = f"{GRPO} --group-filter reward"
DYNAMIC = f"{FILTER} --dynamic-sampling"


@functools.cache
def run_of(folder: Path, flags: str, size: int = 1, layout: str = "", steps: int = 3) -> Path:
    """Run folder of a few steps."""
    save = folder / f"run{len(list(folder.iterdir()))}"
    train("rl", rl_argv(save, f"--train-iters {steps} --lr-decay-iters 9 {flags} {layout}"), size)
    return save


def groups_of(save: Path, step: int) -> list[list[dict]]:
    """Rows of a step's samples by group, two responses each."""
    rows = rows_of(save, step)
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


# Mini-batches of two prompts.
FLAGS = "--advantage grpo --kl-coefficient 0 --prompts-per-step 4 --samples-per-prompt 4 --minibatch-size 8"


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory) -> dict[str, Path]:
    """Mixtures of `many` and `few`, in equal shares, by what they say about groups: `few` has two responses to a prompt
    ("two"), one, or four as the flag says, and in "both" `many` is said to have four, too."""
    folder = tmp_path_factory.mktemp("mixtures")
    few = write_lines(folder / "few.jsonl", [addition(35, n) for n in range(6)])
    texts = {"two": ("", 2), "one": ("", 1), "both": ("  samples-per-prompt: 4\n", 4)}
    for name, (of_many, size) in texts.items():
        own = f"  samples-per-prompt: {size}\n"
        text = f"many:\n  prompts: {inputs() / 'train.jsonl'}\n{of_many}few:\n  prompts: {few}\n{own}"
        (folder / f"{name}.yaml").write_text(text)
    (folder / "silent.yaml").write_text(text.replace("  samples-per-prompt: 4\n", ""))
    return {path.stem: path for path in folder.glob("*.yaml")}


def group_sizes(rows: list[dict]) -> dict[str, list[int]]:
    """Sizes of the groups of each file; all prompts of a step differ."""
    found: dict[str, list[int]] = {"many": [], "few": []}
    for prompt, group in itertools.groupby(rows, lambda row: row["prompt"]):
        found["few" if prompt.startswith("35+") and len(prompt) == 5 else "many"].append(len(list(group)))
    return found


def assert_same(found: Path, expected: Path, steps):
    for step in steps:
        assert samples(found, step) == samples(expected, step)
        one, other = (metric_catalog.reproducible(metrics(save)[step]) for save in (found, expected))
        assert one | {"weights/sync_bytes": 0} == other | {"weights/sync_bytes": 0}  # nothing is sent to saved rollouts


@pytest.mark.long
def test_a_recorded_schedule_knows_the_sizes(mixtures, tmp_path):
    roles = "actor=0;reward=1;rollout=1"
    flags = (
        f"{FLAGS} --prompts {mixtures['two']} --reward tests.helpers.programs:coarse_reward --over-sampling 1.5"
        " --partial-rollouts --rollout-correction tis --generation-lag 2 --train-iters 4 --lr-decay-iters 9"
    )
    train("rl", rl_argv(tmp_path / "run", f"{flags} --role-map {roles} --generation-schedule recorded"), 2)
    for name, size, own in (("same", 2, roles), ("other", 3, "actor=0;reward=1-2;rollout=1-2")):
        replay = f"{flags} --role-map {own} --replay-schedule {tmp_path}/run"
        train("rl", rl_argv(tmp_path / name, replay), size)
    assert_same(tmp_path / "same", tmp_path / "run", [1, 2, 3, 4])
    assert samples(tmp_path / "other", 1) == samples(tmp_path / "run", 1)


@pytest.mark.long
@pytest.mark.parametrize("flags", ["", "--samples-per-prompt 8 --minibatch-size 16"])
def test_files_that_all_say_one_size_are_as_the_flag_alone(flags, mixtures, tmp_path):
    """Also if the flag, by which the size of mini-batches is counted, says another one."""
    for name, own in (("both", flags), ("silent", "")):
        argv = rl_argv(tmp_path / name, f"{FLAGS} --prompts {mixtures[name]} --train-iters 1 --save-interval 1 {own}")
        train("rl", argv)
    assert_same(tmp_path / "both", tmp_path / "silent", [1])
    one, other = (tmp_path / name / "checkpoints" / "step_00000001" for name in ("both", "silent"))
    files = sorted(path.relative_to(one) for path in one.rglob("*.distcp"))
    assert files and all((one / file).read_bytes() == (other / file).read_bytes() for file in files)


@pytest.mark.long
def test_a_group_may_have_one_response_where_none_are_compared(mixtures, tmp_path):
    train("rl", rl_argv(tmp_path, f"{FLAGS} --advantage reinforce++ --prompts {mixtures['one']} --train-iters 2"), 2)
    assert all(group_sizes(rows_of(tmp_path, step)) == {"many": [4, 4], "few": [1, 1]} for step in (1, 2))


ALONE = f"{GRADED} --advantage grpo --kl-coefficient 0 --train-iters 2 --prompts-per-step 4 --samples-per-prompt 4"
AHEAD = f"{ALONE} --role-map actor=0;reward=1;rollout=1 --generation-lag 1 --train-iters 3 --lr 1e-3"
MEASURED = ("actor/loss", "actor/grad_norm", "actor/ppo_kl", "actor/ppo_kl_first", "actor/clip_fraction",
            "rollout/logprob_gap_max", "correction/weight_mean")  # fmt: skip


def steps_of(save, flags: str, size: int = 1) -> dict:
    train("rl", rl_argv(save, flags), size)
    return metrics(save)


UPDATES = {"one": "--ppo-epochs 1 --minibatch-size 16", "six": "--ppo-epochs 3 --minibatch-size 8"}


@pytest.mark.parametrize("updates", by_default(UPDATES, ("six",)))
def test_log_probs_of_the_rollout_change_no_bit_where_it_has_those_of_training(updates, tmp_path):
    flags = f"{ALONE} {UPDATES[updates]}"
    plain = steps_of(tmp_path / "plain", f"{flags} --save-interval 1")
    without = steps_of(tmp_path / "without", f"{flags} --old-logprobs rollout --save-interval 1")
    for step in (1, 2):
        assert all(plain[step][name] == without[step][name] for name in MEASURED)
        assert plain[step]["actor/ppo_kl_first"] == 0 and plain[step]["actor/grad_norm"] > 0
        assert samples(tmp_path / "plain", step) == samples(tmp_path / "without", step)
        assert "time/actor/logprobs_s" not in without[step] and "rollout/entropy" not in without[step]
        assert ("time/actor/logprobs_s" in plain[step]) == (updates == "six")


RUNS = {
    "interpolated": "--old-logprobs interpolate --ppo-epochs 2 --minibatch-size 8",
    "rejected, normalized": "--rollout-rejection token-k1=0.9:1.1 mean-abs=0.5 --rollout-correction tis"
    " --rollout-correction-normalize",
    "all rejected": "--rollout-rejection mean-abs=1e-9 --policy-loss vespo",
}


@pytest.mark.parametrize("name", by_default(RUNS, ("rejected, normalized",)))
def test_stale_responses(name, tmp_path):
    rows = steps_of(tmp_path, f"{AHEAD} {RUNS[name]}", 2)
    first, last = rows[1], rows[2 if name == "all rejected" else 3]  # without an update the third batch is not stale
    assert all(math.isfinite(value) for row in rows.values() for value in row.values())
    if name == "interpolated":
        assert last["actor/ppo_kl_first"] == 0 and last["actor/ppo_kl"] != 0 and last["rollout/logprob_gap_max"] > 0
        return
    assert first["rejection/fraction"] == 0 == first["rejection/responses"]  # the first batch is not stale
    assert last["rejection/fraction"] > 0
    if name == "all rejected":
        assert last["rejection/responses"] > 0 and last["rejection/fraction"] > 0.5
    else:
        assert last["rejection/fraction"] < 1 and last["rejection/token_k1"] > 0 and last["actor/grad_norm"] > 0
        assert last["correction/applied_mean"] != 1
