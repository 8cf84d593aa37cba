"""Episodes of several turns: token rewards, advantages in every layout, and failed episodes that count nowhere."""

import pytest
import torch

from megarl.algorithms.aggregation import AGGREGATIONS
from megarl.batch import Batch
from megarl.groups import PromptGroups
from tests.helpers.envs.episode_batches import COUNT, FAILED, FLAGS, SAMPLES, episodes
from tests.helpers.models import role_stubs
from tests.helpers.models.role_stubs import by_sequence
from tests.helpers.tiers import by_default, long

ALL = tuple(range(COUNT))
TURN_CREDIT = "--advantage rloo --credit turns"


def of_episodes(failed: tuple = FAILED, other_rewards: float = 0.0, without: bool = False) -> dict:
    """The data of a step; scores have `other_rewards` besides, and `without`: there are no failed episodes."""

    def batch_of(dp_rank: int, replicas: int) -> Batch:
        batch = episodes(dp_rank, replicas, failed)
        batch.scores = torch.where(batch.response_lengths > 0, batch.scores + other_rewards * batch.finished, 0.0)
        return batch.select(batch.response_lengths.nonzero().flatten()) if without else batch

    return {"batch_of": batch_of, "groups": PromptGroups.equal(COUNT // SAMPLES, SAMPLES)}


def compute(folder, flags: str, size: int = 1, **data) -> list[role_stubs.Computed]:
    return role_stubs.compute(folder, f"{FLAGS} {flags}", size, **of_episodes(**data))


# -- rewards of tokens -------------------------------------------------------------------------------------------


def test_an_environment_alone_pays_at_the_end_of_each_turn(tmp_path):
    ((batch, rewards, *_),) = compute(tmp_path, "--advantage grpo")
    assert torch.equal(rewards, batch.turn_rewards) and rewards.any()


def test_what_else_a_score_has_is_paid_at_the_end(tmp_path):
    flags = "--advantage grpo --reward 2*environment+format"
    ((batch, rewards, *_),) = compute(tmp_path, flags)
    doubled = 2 * batch.turn_rewards
    begin = 0
    for length, score, written in zip(
        batch.lengths.tolist(), batch.scores.tolist(), batch.response_lengths.tolist(), strict=True
    ):
        expected = doubled[begin : begin + length].tolist()
        if written:
            expected[-1] += score - sum(expected)
        assert rewards[begin : begin + length].tolist() == expected  # multiples of 1/8: nothing is rounded
        begin += length
    ((batch, rewards, *_),) = compute(tmp_path, "--advantage grpo --reward format", other_rewards=1.0)
    ends = (batch.lengths.cumsum(0) - 1)[batch.response_lengths > 0]
    assert torch.equal(rewards[ends], batch.scores[batch.response_lengths > 0])
    assert torch.equal(rewards.nonzero().flatten(), ends[batch.scores[batch.response_lengths > 0] != 0])


def test_a_critic_learns_what_each_turn_still_earns(tmp_path):
    found = compute(tmp_path, "--advantage gae --gamma 1 --gae-lambda 1 --kl-coefficient 0")
    rewards = by_sequence(found, "turn_rewards")
    for number, returns in by_sequence(found, "returns").items():
        mask = by_sequence(found, "response_mask")[number]
        for t, value in enumerate(returns):
            assert value == pytest.approx(sum(rewards[number][t:]) if mask[t] else 0.0, abs=1e-5)


# -- layouts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [
    TURN_CREDIT, long(f"{TURN_CREDIT} --kl-coefficient 0.3"), "--advantage rloo", "--advantage grpo",
    "--advantage gae --whiten-advantages false",
])  # fmt: skip
def test_advantages_have_the_same_bits_in_every_layout(flags, tmp_path):
    one, two = compute(tmp_path, flags), compute(tmp_path, flags, 2)
    assert all(set(batch.prompt_ids.tolist()) == set(range(COUNT // SAMPLES)) for batch, *_ in two)
    assert by_sequence(one, "advantages") == by_sequence(two, "advantages")
    assert one[0].batch.advantages.any()
    for found in two:
        assert found.metrics == pytest.approx(one[0].metrics, rel=1e-6, abs=1e-9)


def test_credit_by_turns_is_that_of_a_loop(tmp_path):
    found = compute(tmp_path, f"{TURN_CREDIT} --kl-coefficient 0")
    rewards, masks = by_sequence(found, "turn_rewards"), by_sequence(found, "response_mask")
    of_turns = {i: [r for r, end in zip(rewards[i], _ends(masks[i]), strict=True) if end] for i in ALL}
    for number, advantages in by_sequence(found, "advantages").items():
        group = range(number // SAMPLES * SAMPLES, (number // SAMPLES + 1) * SAMPLES)
        others = [j for j in group if j != number and j not in FAILED]
        turn, expected = -1, []
        for t, flag in enumerate(masks[number]):
            turn += flag and not masks[number][t - 1]
            baseline = sum(sum(of_turns[j][turn:]) for j in others) / len(others)
            expected.append(sum(of_turns[number][turn:]) - baseline if flag else 0.0)
        assert advantages == pytest.approx(expected, abs=1e-6)


def _ends(mask: list[bool]) -> list[bool]:
    return [flag and not following for flag, following in zip(mask, [*mask[1:], False], strict=True)]


# -- failed episodes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [long(1), 2])
def test_failed_episodes_are_in_no_mean(size, tmp_path):
    for batch, _, metrics, _ in compute(tmp_path, TURN_CREDIT, size):
        whole = episodes(0, 1)
        valid = torch.tensor([i not in FAILED for i in range(COUNT)])
        assert metrics["reward/mean"] == pytest.approx(float(whole.scores[valid].mean()), abs=1e-6)
        assert metrics["reward/std"] == pytest.approx(float(whole.scores[valid].std(correction=0)), abs=1e-6)
        assert metrics["reward/accuracy"] == pytest.approx(float(whole.correct[valid].double().mean()))
        assert metrics["rollout/finished_fraction"] == pytest.approx(float(whole.finished[valid].double().mean()))
        written = int(whole.response_mask.sum()) / int(valid.sum())
        assert metrics["rollout/response_length_mean"] == pytest.approx(written)
        assert batch.advantages.isfinite().all()


@pytest.mark.parametrize("flags", [TURN_CREDIT, long("--advantage rloo"), "--advantage grpo", long("--advantage opo")])
def test_a_failed_episode_changes_nothing_of_other_groups(flags, tmp_path):
    with_failed, without = compute(tmp_path, flags), compute(tmp_path, flags, failed=())
    found, expected = by_sequence(with_failed, "advantages"), by_sequence(without, "advantages")
    touched = {number // SAMPLES for number in FAILED}
    assert all(found[i] == expected[i] for i in ALL if i // SAMPLES not in touched)
    assert any(found[i] != expected[i] for i in ALL if i // SAMPLES in touched and i not in FAILED)


@pytest.mark.parametrize("advantage", [
    "gae", long("grpo"), long("rloo"), long("opo"), long("reinforce++"), "reinforce++-baseline",
])  # fmt: skip
@pytest.mark.parametrize("size", [long(1), 2])
def test_a_step_whose_episodes_all_failed_has_finite_numbers(advantage, size, tmp_path):
    flags = f"--advantage {advantage} --kl-controller adaptive --kl-target 0.1"
    for batch, _, metrics, _ in compute(tmp_path, flags, size, failed=ALL):
        assert not batch.advantages.any() and batch.advantages.isfinite().all()
        assert metrics.pop("perf/tokens") > 0 and metrics.pop("kl/coefficient") == 0.05
        assert not any(metrics.values())


def update(folder, name: str, flags: str, size: int = 1, **data) -> list[role_stubs.Updated]:
    common = f"{FLAGS} --minibatch-size 12 --ppo-epochs 1 --clip-grad 0 --max-response-length 12"
    flags = f"{common} --max-tokens-per-microbatch 160 {flags}"
    return role_stubs.update(folder, name, flags, size, kl=0.1, **of_episodes(**data))


CASES = [("critic", "token-mean"), *(("actor", mode) for mode in AGGREGATIONS)]
DEFAULT = [("critic", "token-mean"), ("actor", "token-mean"), ("actor", "seq-mean-token-sum-norm")]


@pytest.mark.parametrize("name, aggregation", by_default(CASES, DEFAULT))
def test_a_failed_episode_trains_as_if_it_were_not_there(name, aggregation, tmp_path):
    flags = f"--loss-aggregation {aggregation} --kl-in loss --entropy-coefficient 0.05 --rollout-correction tis"
    flags += " --rollout-correction-level sequence"
    (found,), (without,) = update(tmp_path, name, flags), update(tmp_path, name, flags, without=True)
    role_stubs.assert_equal_updates(found, without)
    assert found.changed
    for split in update(tmp_path, name, flags, 2):
        assert split.metrics == pytest.approx(found.metrics, rel=2e-5, abs=1e-6)


@pytest.mark.parametrize("name", ["actor", "critic"])
@pytest.mark.parametrize("size", [long(1), 2])
def test_a_step_whose_episodes_all_failed_changes_no_weight(name, size, tmp_path):
    flags = "--weight-decay 0.1 --kl-in loss --entropy-coefficient 0.05"
    for found in update(tmp_path, name, flags, size, failed=ALL):
        assert not found.changed
        role_stubs.assert_no_update(name, found.metrics)
