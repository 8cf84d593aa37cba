"""Trained roles: the same update for every split into micro-batches and every number of replicas."""

import math

import pytest
import torch

from megarl.batch import Batch
from megarl.groups import PromptGroups
from tests.helpers.models.role_stubs import (
    PLAIN,
    SEQUENCES,
    LocalStepBatch,
    assert_equal_updates,
    experience,
    role_of,
    update,
)
from tests.helpers.programs import program, rl_argv
from tests.helpers.tiers import by_default, long
from tests.helpers.worlds import run_world

# -- updates -----------------------------------------------------------------------------------------------------


SPLITS = {
    "micro-batches of one": (1, "--max-tokens-per-microbatch 10"),
    "two replicas": (2, ""),
    "four replicas, micro-batches of one": (4, "--max-tokens-per-microbatch 10"),
}


@pytest.mark.parametrize("name", ["actor", "critic"])
@pytest.mark.parametrize("split", by_default(SPLITS, ("micro-batches of one", "two replicas")))
def test_the_gradient_does_not_depend_on_the_split(split, name, tmp_path):
    whole = "--max-tokens-per-microbatch 1000 --minibatch-size 12 --ppo-epochs 1 --clip-grad 0"
    (expected,) = update(tmp_path, name, whole, is_recomputed=False)
    assert expected.changed and expected.schedule == 1
    size, flags = SPLITS[split]
    for found in update(tmp_path, name, f"{whole} {flags}", size, is_recomputed=False):
        assert_equal_updates(found, expected)
        assert all((found.weights[key] - weights).abs().max() <= 1e-6 for key, weights in expected.weights.items())
        assert found.schedule == 1


@pytest.mark.long
@pytest.mark.parametrize("name", ["actor", "critic"])
def test_replicas_without_sequences_change_nothing(name, tmp_path):
    """Mini-batches of one sequence: of four replicas three always run an empty micro-batch."""
    flags = "--minibatch-size 1 --ppo-epochs 2"
    (expected,) = update(tmp_path, name, flags, is_recomputed=False)
    assert expected.changed and expected.metrics[f"{name}/updates_skipped"] == 0
    for found in update(tmp_path, name, flags, 4, is_recomputed=False):
        assert all((found.weights[key] - weights).abs().max() <= 1e-5 for key, weights in expected.weights.items())
        assert found.metrics == pytest.approx(expected.metrics, rel=1e-4, abs=1e-6)
        assert found.schedule == expected.schedule


@pytest.mark.parametrize("metric", ["actor/grad_norm", long("actor/loss"), long("critic/loss")])
@pytest.mark.parametrize("size", [long(1), 2])
def test_an_alarm_skips_updates(metric, size, tmp_path):
    name = metric.split("/")[0]
    for action in ("skip", "warn"):  # limits that every number is above
        for found in update(tmp_path, name, f"--alarms {metric}>-1e9:{action}", size, is_recomputed=False):
            assert found.changed == (action == "warn") == (found.metrics[f"{name}/updates_skipped"] == 0)
            assert found.metrics[metric] != 0


@pytest.mark.parametrize("name, field, value", [
    ("actor", "advantages", math.nan), long(("actor", "advantages", math.inf)),
    long(("critic", "returns", math.nan)), ("critic", "returns", math.inf),
])  # fmt: skip
def test_an_update_that_is_not_finite_on_one_replica_is_skipped_on_all(name, field, value, tmp_path):
    def damaged(dp_rank: int, replicas: int) -> Batch:
        batch = experience(dp_rank, replicas)
        if dp_rank == 1:
            getattr(batch, field)[batch.response_mask.nonzero()[0]] = value
        return batch

    for found in update(tmp_path, name, "--minibatch-size 12 --ppo-epochs 2", 2, damaged, is_recomputed=False):
        assert not found.changed and found.schedule == 2  # it counts steps of the run, not what they change
        assert found.metrics[f"{name}/updates_skipped"] == 2


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
