"""Aggregation: local sum / global count gives one loss and one gradient whatever the split."""

import itertools

import pytest
import torch

from megarl.algorithms.aggregation import masked_sum, token_mean
from megarl.algorithms.policy_loss import ppo_clip
from tests.references.ragged import ragged_batches


def test_five_losses_give_their_mean_for_every_split():
    losses = torch.tensor([1.0, 1.0, 1.0, 1.0, 3.0], dtype=torch.float64)
    mask = torch.ones(5, dtype=torch.bool)
    for cuts in itertools.product([False, True], repeat=4):
        borders = [0, *(place + 1 for place, cut in enumerate(cuts) if cut), 5]
        parts = [token_mean(losses[a:b], mask[a:b], 5) for a, b in itertools.pairwise(borders)]
        assert float(sum(parts)) == pytest.approx(1.4, abs=1e-15)


def test_loss_and_gradient_do_not_depend_on_the_split():
    for case, batch in enumerate(ragged_batches()):
        old, advantages = batch.normal(), batch.normal()
        start = old + batch.normal(0.3)
        count = batch.mask.sum()

        def loss_and_gradient(borders):
            logprobs = start.clone().requires_grad_()
            parts = []
            for a, b in itertools.pairwise(borders):
                terms = ppo_clip(logprobs[a:b], old[a:b], advantages[a:b], 0.2, 0.3)
                parts.append(token_mean(terms.loss, batch.mask[a:b], count))
            total = sum(parts)
            total.backward()
            return total.detach(), logprobs.grad

        total = start.numel()
        cuts = torch.randint(0, total + 1, (case % 5,), generator=batch.generator).tolist()
        loss, gradient = loss_and_gradient([0, total])
        split_loss, split_gradient = loss_and_gradient([0, *sorted(cuts), total])
        torch.testing.assert_close(split_loss, loss, rtol=1e-12, atol=1e-14)
        assert torch.equal(split_gradient, gradient)
        assert float(loss) == pytest.approx(float(ppo_clip(start, old, advantages, 0.2, 0.3).loss[batch.mask].mean()))


@pytest.mark.parametrize("count", [0, torch.tensor(0), torch.tensor(0.0)])
def test_no_valid_token_gives_zero_loss_and_zero_gradient(count):
    losses = torch.randn(4, requires_grad=True)
    loss = token_mean(losses, torch.zeros(4, dtype=torch.bool), count)
    loss.backward()
    assert loss.item() == 0.0
    assert torch.equal(losses.grad, torch.zeros(4))


def test_rank_without_tokens_takes_part():
    losses = torch.zeros(0, requires_grad=True)
    loss = token_mean(losses, torch.zeros(0, dtype=torch.bool), torch.tensor(17))
    loss.backward()
    assert loss.item() == 0.0 and losses.grad.shape == (0,)


def test_masked_out_infinity_stays_out():
    values = torch.tensor([1.0, float("inf"), float("nan"), 2.0])
    mask = torch.tensor([True, False, False, True])
    assert float(masked_sum(values, mask)) == 3.0
    assert float(token_mean(values, mask, 2)) == 1.5


def test_dtype_stays_and_shapes_must_agree():
    assert token_mean(torch.ones(3), torch.ones(3, dtype=torch.bool), torch.tensor(3)).dtype == torch.float32
    with pytest.raises(ValueError, match=r"values \[3\], mask \[1\]"):
        token_mean(torch.ones(3), torch.ones(1, dtype=torch.bool), 3)
