"""Aggregation: local sum / global count gives one loss and one gradient whatever the split; against verl."""

import itertools
import math
import random

import pytest
import torch

from megarl.algorithms.advantages import explained_variance, explained_variance_moments
from megarl.algorithms.aggregation import (
    AGGREGATIONS,
    aggregate,
    local_counts,
    local_moments,
    mean_and_variance,
    token_mean,
    whiten,
)
from megarl.algorithms.policy_loss import ClipOptions, PolicyTokens
from megarl.algorithms.policy_losses import POLICY_LOSSES
from tests.references.ragged import ragged_batches
from tests.references.verl_core_algos import load_verl

EVERY_MODE = pytest.mark.parametrize("mode", AGGREGATIONS)
CLIP = ClipOptions(0.2, 0.3)


def loss_by_hand(losses, mask, borders, mode, norm):
    """The loss of a whole batch, from the definition of its mode."""
    responses = [losses[a:b][mask[a:b]].tolist() for a, b in itertools.pairwise(borders.tolist()) if mask[a:b].any()]
    if mode == "token-mean":
        return math.fsum(itertools.chain(*responses)) / sum(map(len, responses))
    divisors = {"seq-mean-token-mean": None, "seq-mean-token-sum": 1.0, "seq-mean-token-sum-norm": norm}
    sums = [math.fsum(response) / (divisors[mode] or len(response)) for response in responses]
    return math.fsum(sums) / len(sums)


def split_by_sequence(batch, draw):
    """The sequences distributed at random over 2 ranks and 2 micro-batches each, some of them empty.

    Returns for each micro-batch the indices of its tokens and its borders.
    """
    deal = [(draw.randrange(2), draw.randrange(2)) for _ in batch.lengths]
    for part in itertools.product(range(2), range(2)):
        mine = [number for number, place in enumerate(deal) if place == part]
        draw.shuffle(mine)
        spans = [torch.arange(batch.cu_seqlens[n], batch.cu_seqlens[n + 1]) for n in mine]
        places = torch.cat([torch.zeros(0, dtype=torch.long), *spans])
        yield places, torch.tensor([0, *itertools.accumulate(batch.lengths[n] for n in mine)])


def test_no_loss_depends_on_micro_batches_and_ranks():
    """Every aggregation of each policy loss: the same loss to rounding, the same gradient to the last bit."""
    for case, (batch, name) in enumerate(zip(ragged_batches(), itertools.cycle(POLICY_LOSSES))):
        old, advantages = batch.normal(), batch.normal()
        logprobs = (old + batch.normal(0.3)).requires_grad_()
        counts = local_counts(batch.mask, batch.cu_seqlens)

        loss_of, options = POLICY_LOSSES[name].function, POLICY_LOSSES[name].options
        options = CLIP if isinstance(CLIP, type(options)) else options

        def terms(places, borders):
            fields = [field[places] for field in (logprobs, old, advantages, batch.mask)]
            return loss_of(PolicyTokens(*fields, borders), options).loss, fields[-1], borders

        parts = [terms(*part) for part in split_by_sequence(batch, random.Random(case))]
        whole = terms(slice(None), batch.cu_seqlens)
        assert torch.equal(sum(local_counts(mask, borders) for _, mask, borders in parts), counts)
        for mode in AGGREGATIONS:
            loss, total = (sum(aggregate(*each, mode, counts, 7.0) for each in split) for split in ([whole], parts))
            expected = loss_by_hand(whole[0].detach(), batch.mask, batch.cu_seqlens, mode, 7.0)
            assert loss.item() == pytest.approx(expected, rel=1e-12, abs=1e-14)
            torch.testing.assert_close(total, loss, rtol=1e-12, atol=1e-14)
            gradients = [torch.autograd.grad(each, logprobs, retain_graph=True)[0] for each in (loss, total)]
            assert torch.equal(*gradients)


@EVERY_MODE
def test_aggregate_equals_verl(mode):
    """Conventions of verl: it adds 1e-8 to n_i in seq-mean-token-mean (so the tolerance there); given a global number
    of sequences, it divides by all of them, the empty ones too; without it, and in megarl, empty ones do not count."""
    agg_loss = load_verl().core_algos.agg_loss
    tolerance = 1e-6 if mode == "seq-mean-token-mean" else 1e-12
    for case, batch in enumerate(ragged_batches()):
        norm, counts = (3.0, 1000.0)[case % 2], local_counts(batch.mask, batch.cu_seqlens)
        losses = batch.normal(10.0 ** (case % 5 - 2)).requires_grad_()
        ours = aggregate(losses, batch.mask, batch.cu_seqlens, mode, counts, norm)
        theirs = agg_loss(batch.padded(losses), batch.padded(batch.mask).double(), mode, loss_scale_factor=norm)
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
        gradients = [torch.autograd.grad(loss, losses, retain_graph=True)[0] for loss in (ours, theirs)]
        torch.testing.assert_close(*gradients, rtol=tolerance, atol=tolerance)

        counts_for_verl = {"batch_num_tokens": int(counts[0]), "global_batch_size": len(batch.lengths), "dp_size": 2}
        theirs = agg_loss(
            batch.padded(losses), batch.padded(batch.mask).double(), mode, loss_scale_factor=norm, **counts_for_verl
        )
        factor = 2.0 if mode == "token-mean" else 2.0 * counts[1] / len(batch.lengths)  # they average over ranks
        torch.testing.assert_close(ours * factor, theirs, rtol=tolerance, atol=tolerance)


def test_token_mean_has_one_way_to_round():
    for batch in ragged_batches():
        for dtype in (torch.float32, torch.float64):
            losses, counts = batch.normal().to(dtype), local_counts(batch.mask, batch.cu_seqlens) * 3
            ours = aggregate(losses, batch.mask, batch.cu_seqlens, "token-mean", counts)
            assert torch.equal(ours, token_mean(losses, batch.mask, counts[0])) and ours.dtype == dtype


def test_counts_take_responses_not_sequences():
    mask = torch.tensor([False, True, True, False, False, True, False, True])
    borders = torch.tensor([0, 3, 5, 5, 8])
    assert torch.equal(local_counts(mask, borders), torch.tensor([4.0, 2.0], dtype=torch.float64))
    losses = torch.tensor([9.0, 1.0, 2.0, 9.0, 9.0, 3.0, 9.0, 5.0])
    values = [aggregate(losses, mask, borders, mode, torch.tensor([4, 2]), 10.0).item() for mode in AGGREGATIONS]
    assert values == pytest.approx([11 / 4, (1.5 + 4) / 2, 11 / 2, 11 / 20])


@EVERY_MODE
def test_masked_out_infinity_stays_out_of_loss_and_gradient(mode):
    losses = torch.tensor([1.0, float("inf"), float("nan"), 2.0], requires_grad=True)
    mask, borders = torch.tensor([True, False, False, True]), torch.tensor([0, 2, 4])
    loss = aggregate(losses, mask, borders, mode, local_counts(mask, borders), norm=2.0)
    loss.backward()
    assert loss.item() in (1.5, 0.75) and losses.grad.isfinite().all() and not losses.grad[~mask].any()


def test_bad_arguments_are_rejected():
    losses, mask, borders, counts = torch.ones(3), torch.ones(3, dtype=torch.bool), torch.tensor([0, 3]), torch.ones(2)
    with pytest.raises(ValueError, match="'mean' is unknown, allowed: token-mean, seq-mean-token-mean"):
        aggregate(losses, mask, borders, "mean", counts)
    for norm in (None, 0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="seq-mean-token-sum-norm needs a norm > 0"):
            aggregate(losses, mask, borders, "seq-mean-token-sum-norm", counts, norm)
    for mode in AGGREGATIONS:
        with pytest.raises(ValueError, match="one shape"):
            aggregate(losses[:1], mask, borders, mode, counts, 1.0)


@pytest.mark.parametrize("size, count", [(4, 0), (4, torch.tensor(0)), (4, torch.tensor(0.0)), (0, torch.tensor(17))])
def test_no_valid_token_gives_zero_loss_and_zero_gradient(size, count):
    losses = torch.randn(size, requires_grad=True)
    loss = token_mean(losses, torch.zeros(size, dtype=torch.bool), count)
    loss.backward()
    assert loss.item() == 0.0 and torch.equal(losses.grad, torch.zeros(size))


def test_dtype_stays_and_shapes_must_agree():
    assert token_mean(torch.ones(3), torch.ones(3, dtype=torch.bool), torch.tensor(3)).dtype == torch.float32
    with pytest.raises(ValueError, match=r"values \[3\], mask \[1\]"):
        token_mean(torch.ones(3), torch.ones(1, dtype=torch.bool), 3)


# -- mean, variance and whitening ---------------------------------------------------------------------------------


def test_whiten_equals_verl_and_direct_formula():
    masked_whiten = load_verl().torch_functional.masked_whiten
    for case, batch in enumerate(ragged_batches()):
        values = 10.0 ** (case % 5 - 2) * (batch.normal() + case % 7)
        valid = values[batch.mask]
        moments = local_moments(values, batch.mask)
        result = whiten(values, batch.mask, moments)
        # verl adds 1e-8 to the count, a bias of 1e-8 / count: the looser tolerance is its error.
        expected = masked_whiten(values, batch.mask)[batch.mask]
        torch.testing.assert_close(result[batch.mask], expected, rtol=1e-6, atol=1e-6)
        expected = (valid - valid.mean()) / (valid.var() + 1e-8).sqrt()
        torch.testing.assert_close(result[batch.mask], expected, rtol=1e-10, atol=1e-10)
        assert torch.equal(result[~batch.mask], torch.zeros_like(result[~batch.mask]))


def test_split_whitening_and_explained_variance_equal_the_whole():
    for case, batch in enumerate(ragged_batches()):
        values, returns = batch.normal().float(), batch.normal().float()
        total = values.numel()
        cuts = sorted(torch.randint(0, total + 1, (case % 4,), generator=batch.generator).tolist())
        spans = [slice(a, b) for a, b in zip([0, *cuts], [*cuts, total])]
        moments = sum(local_moments(values[span], batch.mask[span]) for span in spans)
        parts = torch.cat([whiten(values[span], batch.mask[span], moments) for span in spans])
        whole = whiten(values, batch.mask, local_moments(values, batch.mask))
        assert parts.dtype == torch.float32
        torch.testing.assert_close(parts, whole, rtol=1e-6, atol=1e-7)

        whole = explained_variance_moments(values, returns, batch.mask)
        parts = sum(explained_variance_moments(values[s], returns[s], batch.mask[s]) for s in spans)
        assert explained_variance(parts) == pytest.approx(explained_variance(whole), abs=1e-10)
        predicted, target = values[batch.mask].double(), returns[batch.mask].double()
        expected = 1 - (target - predicted).var() / target.var()
        assert explained_variance(whole) == pytest.approx(float(expected), rel=1e-9, abs=1e-9)


def test_float32_values_far_from_zero_keep_their_variance():
    noise = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    values, mask = noise + 10_000, torch.ones(5000, dtype=torch.bool)
    _, variance = mean_and_variance(local_moments(values, mask))
    assert float(variance) == pytest.approx(float(values.double().var()), rel=1e-7)


def test_equal_values_come_out_finite():
    values, mask = torch.full((1000,), 0.1), torch.ones(1000, dtype=torch.bool)
    moments = sum(local_moments(part, torch.ones_like(part, dtype=torch.bool)) for part in values.split(7))
    torch.testing.assert_close(whiten(values, mask, moments), torch.zeros(1000), rtol=1e-7, atol=1e-7)


def test_one_and_no_valid_token():
    values = torch.tensor([0.3, float("inf"), float("nan")])
    one, none = torch.tensor([True, False, False]), torch.zeros(3, dtype=torch.bool)
    assert torch.equal(whiten(values, one, local_moments(values, one)), torch.zeros(3))
    assert torch.equal(whiten(values, none, local_moments(values, none)), torch.zeros(3))


def test_shapes_must_agree():
    with pytest.raises(ValueError, match=r"values \[3\], mask \[1\]"):
        local_moments(torch.ones(3), torch.ones(1, dtype=torch.bool))
    with pytest.raises(ValueError, match="one shape"):
        whiten(torch.ones(3), torch.ones(1, dtype=torch.bool), torch.ones(3))
    with pytest.raises(ValueError, match="one shape"):
        explained_variance_moments(torch.ones(1), torch.ones(3), torch.ones(3, dtype=torch.bool))
