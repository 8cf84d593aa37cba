"""The critic's update: the clipped value loss around the values of before the step, whatever the split."""

import pytest
import torch

from tests.helpers.models.role_stubs import PLAIN, LocalStepBatch, experience, role_of
from tests.helpers.programs import program, rl_argv
from tests.helpers.worlds import run_world

CLIP = 0.3
FLAGS = f"{PLAIN} --critic-lr 0.05 --minibatch-size 12 --ppo-epochs 1 --clip-grad 0 --value-clip-range {CLIP}"


def updated(rank: int, parsed):
    """(metrics of an update, [T] values before it, those of the batch, returns, tokens that count) of a replica.

    The batch's values are other ones, as they are after the first of several updates.
    """
    role, place = role_of("critic", parsed)
    batch = experience(place.dp_rank, len(place.replicas))
    of_batch = batch.values
    role.values(LocalStepBatch(critic=batch))
    before, batch.values = batch.values, of_batch
    role.update(LocalStepBatch(critic=batch))
    return role.metrics, before.double(), of_batch.double(), batch.returns.double(), batch.response_mask


@pytest.mark.parametrize("size, layout", [(1, ""), (2, "--max-tokens-per-microbatch 10")])
def test_the_loss_is_clipped_around_the_values_of_the_batch(size, layout, tmp_path):
    found = run_world(updated, size, program("rl", rl_argv(tmp_path, f"{FLAGS} {layout}"), size))
    values, old, returns, mask = (torch.cat(parts) for parts in list(zip(*found, strict=True))[1:])
    whole, clipped = ((v - returns) ** 2 for v in (values, values.clamp(old - CLIP, old + CLIP)))
    share = (clipped > whole)[mask].double().mean().item()
    assert 0.2 < share < 0.8
    explained = 1 - (returns - old)[mask].var(correction=0) / returns[mask].var(correction=0)
    for metrics, *_ in found:
        assert metrics["critic/explained_variance"] == pytest.approx(explained.item(), rel=1e-5)
        assert metrics["critic/loss"] == pytest.approx(
            0.5 * torch.maximum(whole, clipped)[mask].mean().item(), rel=1e-5
        )
        assert metrics["critic/clip_fraction"] == pytest.approx(share) and metrics["critic/grad_norm"] > 1e-3
