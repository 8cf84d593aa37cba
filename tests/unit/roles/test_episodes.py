"""Episodes of several turns: token rewards, advantages in every layout, and failed episodes that count nowhere."""

import pytest
import torch

from megarl.algorithms.aggregation import AGGREGATIONS
from megarl.batch import Batch
from megarl.groups import PromptGroups
from megarl.observe.timers import Timers
from tests.helpers.envs.episode_batches import COUNT, FAILED, FLAGS, SAMPLES, episodes
from tests.helpers.models.role_stubs import PLAIN, LocalStepBatch, role_of
from tests.helpers.programs import program, rl_argv
from tests.helpers.tiers import long
from tests.helpers.worlds import SAFETY, run_world

ALL = tuple(range(COUNT))
TURN_CREDIT = "--advantage rloo --credit turns"


def computed(rank: int, parsed, failed, other_rewards: float) -> tuple[Batch, torch.Tensor, dict]:
    """(batch with advantages, token rewards, metrics) of this replica; scores have `other_rewards` besides."""
    from megarl.comm import role_mesh
    from megarl.roles.advantage_computer import AdvantageComputer

    place = role_mesh.create_mesh(parsed.roles, SAFETY)["actor"]
    batch, role = episodes(place.dp_rank, len(place.replicas), failed), AdvantageComputer(
        parsed.settings, parsed.estimator, place, Timers()
    )  # fmt: skip
    batch.advantages = batch.returns = None
    batch.scores = torch.where(batch.response_lengths > 0, batch.scores + other_rewards * batch.finished, 0.0)
    held = LocalStepBatch(actor=batch)
    held.groups = PromptGroups.equal(COUNT // SAMPLES, SAMPLES)
    role.compute(held)
    role.update_kl_coefficient(held)
    return batch, role._token_rewards(batch, 0.0), role.metrics


def compute(folder, flags: str, size: int = 1, failed: tuple = FAILED, other_rewards: float = 0.0) -> list:
    return run_world(computed, size, program("rl", rl_argv(folder, f"{FLAGS} {flags}"), size), failed, other_rewards)


def by_sequence(results: list, name: str) -> dict[int, list]:
    rows = {}
    for batch, *_ in results:
        parts = getattr(batch, name).split(batch.lengths.tolist())
        rows |= dict(zip(batch.sequence_ids.tolist(), (part.tolist() for part in parts), strict=True))
    return rows


# -- rewards of tokens -------------------------------------------------------------------------------------------


def test_an_environment_alone_pays_at_the_end_of_each_turn(tmp_path):
    ((batch, rewards, _),) = compute(tmp_path, "--advantage grpo")
    assert torch.equal(rewards, batch.turn_rewards) and rewards.any()


def test_what_else_a_score_has_is_paid_at_the_end(tmp_path):
    flags = "--advantage grpo --reward 2*environment+format"
    ((batch, rewards, _),) = compute(tmp_path, flags, other_rewards=0.0)
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
    ((batch, rewards, _),) = compute(tmp_path, "--advantage grpo --reward format", other_rewards=1.0)
    ends = (batch.lengths.cumsum(0) - 1)[batch.response_lengths > 0]
    assert torch.equal(rewards[ends], batch.scores[batch.response_lengths > 0])
    assert torch.equal(rewards.nonzero().flatten(), ends[batch.scores[batch.response_lengths > 0] != 0])


def test_a_critic_learns_what_each_turn_still_earns(tmp_path):
    ((batch, _, _),) = compute(tmp_path, "--advantage gae --gamma 1 --gae-lambda 1 --kl-coefficient 0")
    rewards = by_sequence([(batch,)], "turn_rewards")
    for number, returns in by_sequence([(batch,)], "returns").items():
        mask = by_sequence([(batch,)], "response_mask")[number]
        for t, found in enumerate(returns):
            assert found == pytest.approx(sum(rewards[number][t:]) if mask[t] else 0.0, abs=1e-5)


# -- layouts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [
    TURN_CREDIT, long(f"{TURN_CREDIT} --kl-coefficient 0.3"), "--advantage rloo", "--advantage grpo",
    "--advantage gae --whiten-advantages false",
])  # fmt: skip
def test_advantages_have_the_same_bits_in_every_layout(flags, tmp_path):
    one, two = compute(tmp_path, flags), compute(tmp_path, flags, 2)
    assert all(set(batch.prompt_ids.tolist()) == set(range(COUNT // SAMPLES)) for batch, *_ in two)
    assert by_sequence(one, "advantages") == by_sequence(two, "advantages")
    assert one[0][0].advantages.any()
    for _, _, metrics in two:
        assert metrics == pytest.approx(one[0][2], rel=1e-6, abs=1e-9)


def test_credit_by_turns_is_that_of_a_loop(tmp_path):
    ((batch, _, _),) = compute(tmp_path, f"{TURN_CREDIT} --kl-coefficient 0")
    rewards, masks = by_sequence([(batch,)], "turn_rewards"), by_sequence([(batch,)], "response_mask")
    of_turns = {i: [r for r, end in zip(rewards[i], _ends(masks[i]), strict=True) if end] for i in ALL}
    for number, advantages in by_sequence([(batch,)], "advantages").items():
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


@pytest.mark.parametrize("size", [1, 2])
def test_failed_episodes_are_in_no_mean(size, tmp_path):
    for batch, _, metrics in compute(tmp_path, TURN_CREDIT, size):
        whole = episodes(0, 1)
        valid = torch.tensor([i not in FAILED for i in range(COUNT)])
        assert metrics["reward/mean"] == pytest.approx(float(whole.scores[valid].mean()), abs=1e-6)
        assert metrics["reward/std"] == pytest.approx(float(whole.scores[valid].std(correction=0)), abs=1e-6)
        assert metrics["reward/accuracy"] == pytest.approx(float(whole.correct[valid].double().mean()))
        assert metrics["rollout/finished_fraction"] == pytest.approx(float(whole.finished[valid].double().mean()))
        written = int(whole.response_mask.sum()) / int(valid.sum())
        assert metrics["rollout/response_length_mean"] == pytest.approx(written)
        assert batch.advantages.isfinite().all()


@pytest.mark.parametrize("flags", [TURN_CREDIT, "--advantage rloo", "--advantage grpo", "--advantage opo"])
def test_a_failed_episode_changes_nothing_of_other_groups(flags, tmp_path):
    with_failed, without = compute(tmp_path, flags), compute(tmp_path, flags, failed=())
    found, expected = by_sequence(with_failed, "advantages"), by_sequence(without, "advantages")
    touched = {number // SAMPLES for number in FAILED}
    assert all(found[i] == expected[i] for i in ALL if i // SAMPLES not in touched)
    assert any(found[i] != expected[i] for i in ALL if i // SAMPLES in touched and i not in FAILED)


@pytest.mark.parametrize("advantage", ["gae", "grpo", "rloo", "opo", "reinforce++", "reinforce++-baseline"])
@pytest.mark.parametrize("size", [long(1), 2])
def test_a_step_whose_episodes_all_failed_has_finite_numbers(advantage, size, tmp_path):
    flags = f"--advantage {advantage} --kl-controller adaptive --kl-target 0.1"
    for batch, _, metrics in compute(tmp_path, flags, size, ALL):
        assert not batch.advantages.any() and batch.advantages.isfinite().all()
        assert metrics.pop("perf/tokens") > 0 and metrics.pop("kl/coefficient") == 0.05
        assert not any(metrics.values())


def updated(rank: int, parsed, name: str, failed: tuple, without: bool) -> tuple[dict, dict, bool]:
    """(gradients, metrics, whether weights changed) of an update; `without`: of the batch less the failed ones."""
    role, place = role_of(name, parsed)
    batch = episodes(place.dp_rank, len(place.replicas), failed)
    if without:
        batch = batch.select(batch.response_lengths.nonzero().flatten())
    before = [p.detach().clone() for p in role.trainable_model.model.parameters()]
    role._updates_on_policy = lambda *_: False
    held = LocalStepBatch({name: batch})
    held.groups = PromptGroups.equal(COUNT // SAMPLES, SAMPLES)
    role.update(held, *[0.1] * (name == "actor"))
    model = role.trainable_model.model
    changed = any(not torch.equal(*pair) for pair in zip(before, model.parameters()))
    return {n: p.main_grad.clone() for n, p in model.named_parameters()}, role.metrics, changed


def update(folder, name: str, flags: str, size: int = 1, failed: tuple = FAILED, without: bool = False) -> list:
    common = f"{FLAGS} {PLAIN} --critic-lr 0.05 --minibatch-size 12 --ppo-epochs 1 --clip-grad 0"
    flags = f"{common} --max-response-length 12 --max-tokens-per-microbatch 160 {flags}"
    return run_world(updated, size, program("rl", rl_argv(folder, flags), size), name, failed, without)


CASES = [("critic", "token-mean"), *(("actor", mode) for mode in AGGREGATIONS)]


@pytest.mark.parametrize("name, aggregation", CASES)
def test_a_failed_episode_trains_as_if_it_were_not_there(name, aggregation, tmp_path):
    flags = f"--loss-aggregation {aggregation} --kl-in loss --entropy-coefficient 0.05 --rollout-correction tis"
    flags += " --rollout-correction-level sequence"
    ((gradients, metrics, changed),) = update(tmp_path, name, flags)
    ((its_gradients, its_metrics, _),) = update(tmp_path, name, flags, without=True)
    largest = max(float(gradient.abs().max()) for gradient in its_gradients.values())
    assert largest > 1e-3 and changed
    assert all((gradients[key] - gradient).abs().max() <= 2e-6 * largest for key, gradient in its_gradients.items())
    assert metrics == pytest.approx(its_metrics, rel=1e-5, abs=1e-7)
    for _, split, _ in update(tmp_path, name, flags, 2):
        assert split == pytest.approx(metrics, rel=2e-5, abs=1e-6)


@pytest.mark.parametrize("name", ["actor", "critic"])
@pytest.mark.parametrize("size", [long(1), 2])
def test_a_step_whose_episodes_all_failed_changes_no_weight(name, size, tmp_path):
    flags = "--weight-decay 0.1 --kl-in loss --entropy-coefficient 0.05"
    for _, metrics, changed in update(tmp_path, name, flags, size, ALL):
        assert not changed
        assert metrics[f"{name}/updates_skipped"] == 0
        assert not {f"{name}/loss", f"{name}/grad_norm"} & metrics.keys()
        assert all(value == value and abs(value) != float("inf") for value in metrics.values())
