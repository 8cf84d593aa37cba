"""Trained roles: the same update for every split into micro-batches and every number of replicas."""

import pytest
import torch

from megarl.groups import PromptGroups
from tests.helpers.models.role_stubs import PLAIN, SEQUENCES, LocalStepBatch, experience, role_of
from tests.helpers.programs import program, rl_argv
from tests.helpers.tiers import by_default, long
from tests.helpers.worlds import run_world

# -- updates -----------------------------------------------------------------------------------------------------


def updated(rank: int, parsed, name: str, bad=None):
    """(gradients of the last update, weights, metrics with the schedule's position, whether unchanged) of a role."""
    role, place = role_of(name, parsed)
    batch = experience(place.dp_rank, len(place.replicas))
    before = {n: p.detach().clone() for n, p in role.trainable_model.model.named_parameters()}
    if bad is not None and rank == 1:
        field, value = bad
        getattr(batch, field)[batch.response_mask.nonzero()[0]] = value
    role.update(LocalStepBatch({name: batch}), *[0.0] * (name == "actor"))
    gradients = {n: p.main_grad.clone() for n, p in role.trainable_model.model.named_parameters()}
    weights = {n: p.detach().clone() for n, p in role.trainable_model.model.named_parameters()}
    numbers = role.metrics | {"schedule": role.trainable_model.scheduler.num_steps}
    return gradients, weights, numbers, all(torch.equal(before[n], weights[n]) for n in weights)


def update(folder, name: str, flags: str, size: int = 1, bad=None) -> list:
    parsed = program("rl", rl_argv(folder, f"{PLAIN} --critic-lr 0.05 {flags}"), size)
    return run_world(updated, size, parsed, name, bad)


SPLITS = {
    "micro-batches of one": (1, "--max-tokens-per-microbatch 10"),
    "two replicas": (2, ""),
    "four replicas, micro-batches of one": (4, "--max-tokens-per-microbatch 10"),
}


@pytest.mark.parametrize("name", ["actor", "critic"])
@pytest.mark.parametrize("split", by_default(SPLITS, ("micro-batches of one", "two replicas")))
def test_the_gradient_does_not_depend_on_the_split(split, name, tmp_path):
    whole = "--max-tokens-per-microbatch 1000 --minibatch-size 12 --ppo-epochs 1 --clip-grad 0"
    ((expected, weights, numbers, unchanged),) = update(tmp_path, name, whole)
    assert not unchanged and numbers["schedule"] == 1
    size, flags = SPLITS[split]
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    assert largest > 1e-3
    for found, its_weights, its_numbers, _ in update(tmp_path, name, f"{whole} {flags}", size):
        for key, gradient in expected.items():
            assert (found[key] - gradient).abs().max() <= 2e-6 * max(largest, 1), key
            assert (its_weights[key] - weights[key]).abs().max() <= 1e-6, key
        assert its_numbers == pytest.approx(numbers, rel=1e-5, abs=1e-7)


@pytest.mark.long
@pytest.mark.parametrize("name", ["actor", "critic"])
def test_replicas_without_sequences_change_nothing(name, tmp_path):
    """Mini-batches of one sequence: of four replicas three always run an empty micro-batch."""
    flags = "--minibatch-size 1 --ppo-epochs 2"
    ((_, weights, numbers, unchanged),) = update(tmp_path, name, flags)
    assert not unchanged and numbers[f"{name}/updates_skipped"] == 0
    for _, its_weights, its_numbers, _ in update(tmp_path, name, flags, 4):
        assert all((its_weights[key] - weights[key]).abs().max() <= 1e-5 for key in weights)
        assert its_numbers == pytest.approx(numbers, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("metric", ["actor/grad_norm", long("actor/loss"), long("critic/loss")])
@pytest.mark.parametrize("size", [long(1), 2])
def test_an_alarm_skips_updates(metric, size, tmp_path):
    name = metric.split("/")[0]
    for action in ("skip", "warn"):  # limits that every number is above
        for _, _, numbers, unchanged in update(tmp_path, name, f"--alarms {metric}>-1e9:{action}", size):
            assert unchanged == (action == "skip")
            assert (numbers[f"{name}/updates_skipped"] > 0) == unchanged and numbers[metric] != 0


@pytest.mark.parametrize("name, field", [("actor", "advantages"), ("critic", "returns")])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_update_that_is_not_finite_on_one_replica_is_skipped_on_all(name, field, value, tmp_path):
    flags = "--minibatch-size 12 --ppo-epochs 2"
    for _, _, numbers, unchanged in update(tmp_path, name, flags, 2, (field, value)):
        assert unchanged and numbers["schedule"] == 2  # it counts steps of the run, not what they change
        assert numbers[f"{name}/updates_skipped"] == 2


def schedule_of_steps(rank: int, parsed, name: str, kept: int) -> list[int]:
    """The schedule's position after steps of all sequences, of only the first `kept`, of none, and of all again."""
    role, place = role_of(name, parsed)
    whole, found = experience(place.dp_rank, len(place.replicas)), []
    for step, count in enumerate((SEQUENCES, kept, 0, SEQUENCES), 1):
        role.trainable_model.begin_step(step)
        if count:
            step_batch = LocalStepBatch({name: whole.select((whole.sequence_ids < count).nonzero().flatten())})
            step_batch.groups, step_batch.step = PromptGroups.equal(count // 2, 2), step
            role.update(step_batch, *[0.0] * (name == "actor"))
        found.append(role.trainable_model.scheduler.num_steps)
    return found


@pytest.mark.parametrize("name", ["actor", long("critic")])
@pytest.mark.parametrize("size", [1, long(2)])
def test_the_schedule_counts_steps_of_the_run_not_updates(name, size, tmp_path):
    """A group filter leaves fewer updates to a step, or none (verl #991)."""
    flags = f"{PLAIN} --critic-lr 0.05 --minibatch-size 4 --ppo-epochs 2 --critic-warmup-steps 1"
    parsed = program("rl", rl_argv(tmp_path, flags), size)
    for found in run_world(schedule_of_steps, size, parsed, name, 4):
        assert found == [6, 12, 12, 24]  # six updates in a full step; without a batch only the next step moves it on


def entropies(rank: int, parsed, masked: int) -> tuple[float, float]:
    """(`actor/entropy` of a step, mean entropy of its response tokens) with truncated responses to mask."""
    role, place = role_of("actor", parsed)
    batch = experience(place.dp_rank, len(place.replicas))
    batch.finished[:] = batch.sequence_ids >= masked
    batch.logprobs[:], batch.entropy[:] = 0.0, 0.0
    step_batch = LocalStepBatch({"actor": batch})
    step_batch.groups = PromptGroups.equal(SEQUENCES, 1)
    role.old_logprobs(step_batch)
    role.update(step_batch, 0.0)
    counted = batch.response_mask & batch.finished.repeat_interleave(batch.lengths)
    sums = torch.stack([batch.entropy[counted].sum(), counted.sum()]).double()
    total, count = place.dp_all_reduce(sums).tolist()
    return role.metrics["actor/entropy"], total / count


@pytest.mark.parametrize("masked", [0, 10])
@pytest.mark.parametrize("size", [1, long(2)])
def test_a_mean_over_updates_is_one_over_tokens(masked, size, tmp_path):
    """Mini-batches of unequal size, some without a token that counts (TRL #7012, #7047); the policy does not change."""
    flags = f"{PLAIN} --lr 0 --minibatch-size 5 --ppo-epochs 1 --entropy-coefficient 0 --mask-truncated-responses"
    parsed = program("rl", rl_argv(tmp_path, f"{flags} --samples-per-prompt 1"), size)
    for found, expected in run_world(entropies, size, parsed, masked):
        assert found == pytest.approx(expected, rel=1e-6)
