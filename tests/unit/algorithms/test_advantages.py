"""Token rewards, returns-to-go and GAE, the critic's loss: against verl, closed forms; independent of the batch."""

import itertools
import math
import types

import pytest
import torch

from megarl.algorithms.advantages import (
    clipped_value_loss,
    discounted_sums,
    discounted_to_go,
    explained_variance,
    explained_variance_moments,
    gae,
    token_rewards,
)
from megarl.algorithms.aggregation import local_moments, whiten
from tests.references.ragged import ragged_batch, ragged_batches
from tests.references.verl_core_algos import load_verl

GAMMAS_AND_LAMBDAS = [(1.0, 1.0), (1.0, 0.95), (0.99, 0.9), (0.5, 0.0), (0.0, 1.0)]


def test_gae_equals_verl():
    compute_gae = load_verl().core_algos.compute_gae_advantage_return
    for case, batch in enumerate(ragged_batches()):
        gamma, lam = GAMMAS_AND_LAMBDAS[case % 5]
        scale = 10.0 ** (case % 3)
        rewards, values = batch.normal(scale), batch.normal(scale)
        advantages, returns = gae(rewards, values, batch.mask, batch.cu_seqlens, gamma, lam)
        padded = (batch.padded(rewards), batch.padded(values), batch.padded(batch.mask).long())
        whitened, padded_returns = compute_gae(*padded, gamma, lam)
        expected = batch.packed(padded_returns)[batch.mask]
        torch.testing.assert_close(returns[batch.mask], expected, rtol=1e-11, atol=1e-10)
        assert torch.equal((advantages + values)[batch.mask], returns[batch.mask])
        ours = whiten(advantages, batch.mask, local_moments(advantages, batch.mask))
        expected = batch.packed(whitened)[batch.mask]
        torch.testing.assert_close(ours[batch.mask], expected, rtol=1e-6, atol=1e-6)
        assert not advantages[~batch.mask].any() and not returns[~batch.mask].any()


def test_a_sequence_does_not_depend_on_the_batch():
    for seed in range(40):
        batch = ragged_batch(seed)
        rewards, values = batch.normal().float(), batch.normal().float()
        whole = gae(rewards, values, batch.mask, batch.cu_seqlens, 0.99, 0.95)
        spans = [slice(int(a), int(b)) for a, b in zip(batch.cu_seqlens, batch.cu_seqlens[1:])]
        for span in spans:
            borders = torch.tensor([0, span.stop - span.start])
            alone = gae(rewards[span], values[span], batch.mask[span], borders, 0.99, 0.95)
            assert torch.equal(alone[0], whole[0][span]) and torch.equal(alone[1], whole[1][span])
        # Many copies next to it: other positions in the vector registers and a longer longest sequence.
        order = [*spans, *spans[::-1], *spans]
        lengths = torch.tensor([0, *(span.stop - span.start for span in order), 50]).cumsum(0)
        fields = [
            torch.cat([*(field[span] for span in order), filler])
            for field, filler in ((rewards, torch.ones(50)), (values, torch.ones(50)), (batch.mask, torch.ones(50) > 0))
        ]
        many = gae(*fields, lengths, 0.99, 0.95)
        for place, span in enumerate(order):
            there = slice(int(lengths[place]), int(lengths[place + 1]))
            assert torch.equal(many[0][there], whole[0][span]) and torch.equal(many[1][there], whole[1][span])


def test_observations_are_skipped_and_do_not_discount():
    rewards, values = torch.randn(3), torch.randn(3)
    compact = gae(rewards, values, torch.ones(3, dtype=torch.bool), torch.tensor([0, 3]), 0.9, 0.8)
    mask = torch.tensor([False, True, False, False, True, True, False])
    spread = [torch.full((7,), 1e6).masked_scatter(mask, field) for field in (rewards, values)]
    advantages, returns = gae(*spread, mask, torch.tensor([0, 7]), 0.9, 0.8)
    assert torch.equal(advantages[mask], compact[0]) and torch.equal(returns[mask], compact[1])


def test_token_rewards_equal_a_plain_loop_and_verl():
    compute_rewards = load_verl().core_algos.compute_rewards
    for case, batch in enumerate(ragged_batches()):
        scores = torch.randn(len(batch.lengths), generator=batch.generator, dtype=torch.float64)
        logprobs, reference, beta = batch.normal(5), batch.normal(5), 0.1 * (case % 4)
        result = token_rewards(scores, logprobs - reference, beta, batch.mask, batch.cu_seqlens)
        at_end, start = torch.zeros_like(result), 0
        for score, length in zip(scores, batch.lengths):
            tokens = [t for t in range(start, start + length) if batch.mask[t]]
            if tokens:
                at_end[tokens[-1]] = score
            start += length
        expected = compute_rewards(at_end, logprobs, reference, beta) * batch.mask
        torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)


def test_score_lands_on_the_last_response_token_and_empty_responses_get_none():
    mask = torch.tensor([False, True, True, False, False, False, False, True])
    kl = torch.tensor([float("nan"), 1.0, 2.0, float("inf"), 5.0, 5.0, 5.0, 3.0])
    scores = torch.tensor([10.0, 1000.0, -7.0])
    rewards = token_rewards(scores, kl, 0.5, mask, torch.tensor([0, 4, 6, 8]))
    assert rewards.tolist() == [0.0, -0.5, 9.0, 0.0, 0.0, 0.0, 0.0, -8.5]


@pytest.mark.parametrize("lengths", [[], [0], [0, 0], [3], [0, 3, 0]])
def test_no_response_at_all(lengths):
    total, borders = sum(lengths), torch.tensor([0, *lengths]).cumsum(0)
    empty = torch.zeros(total), torch.zeros(total, dtype=torch.bool), borders
    rewards = token_rewards(torch.ones(len(lengths)), empty[0], 0.1, *empty[1:])
    advantages, returns = gae(rewards, torch.ones(total), *empty[1:], 1.0, 1.0)
    for field in (rewards, advantages, returns, discounted_to_go(torch.ones(total), *empty[1:], 1.0)):
        assert torch.equal(field, torch.zeros(total))


def test_int32_borders_give_the_same():
    batch = ragged_batch(3)
    fields = batch.normal(), batch.normal(), batch.mask
    wide, narrow = (gae(*fields, borders, 1.0, 0.9)[0] for borders in (batch.cu_seqlens, batch.cu_seqlens.int()))
    assert torch.equal(wide, narrow)


@pytest.mark.parametrize("borders", [[0, 3], [1, 4], [0, 3, 2, 4], [0, 5], [], [[0, 4]]])
def test_wrong_borders_are_rejected(borders):
    with pytest.raises(ValueError, match="cu_seqlens must"):
        gae(torch.ones(4), torch.ones(4), torch.ones(4, dtype=torch.bool), torch.tensor(borders), 1.0, 1.0)


def test_wrong_arguments_are_rejected():
    ones, mask, borders = torch.ones(4), torch.ones(4, dtype=torch.bool), torch.tensor([0, 4])
    for factor in (-0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match=rf"factor must be in \[0, 1\], got {factor}"):
            gae(ones, ones, mask, borders, factor, 1.0)
    with pytest.raises(ValueError, match="one shape"):
        gae(ones[:1], ones, mask, borders, 1.0, 1.0)
    with pytest.raises(ValueError, match="must be bool"):
        gae(ones, ones, ones, borders, 1.0, 1.0)
    with pytest.raises(ValueError, match=r"scores must be \[1\]"):
        token_rewards(torch.ones(2), ones, 0.1, mask, borders)


def test_the_length_adaptive_factor_is_that_of_each_response():
    """VAPO: the advantages of a response are GAE's with λ = 1 − 1/(α·l), its returns those of the given λ."""
    for case, batch in enumerate(ragged_batches()):
        rewards, values, alpha = batch.normal(), batch.normal(), (0.05, 0.3, 2.0)[case % 3]
        advantages, returns = gae(rewards, values, batch.mask, batch.cu_seqlens, 0.97, 0.9, alpha)
        assert torch.equal(returns, gae(rewards, values, batch.mask, batch.cu_seqlens, 0.97, 0.9)[1])
        for start, stop in itertools.pairwise(batch.cu_seqlens.tolist()):
            kept = batch.mask[start:stop]
            lam, its, of_values, found = max(1 - 1 / (alpha * max(int(kept.sum()), 1)), 0.0), 0.0, [0.0], []
            rows = [field[start:stop][kept].tolist() for field in (rewards, values)]
            for reward, value in zip(*(row[::-1] for row in rows), strict=True):
                its = reward + 0.97 * of_values[-1] - value + 0.97 * lam * its
                of_values.append(value)
                found.append(its)
            expected = torch.tensor(found[::-1], dtype=torch.float64)
            torch.testing.assert_close(advantages[start:stop][kept], expected, rtol=1e-12, atol=1e-12)


# -- sums over the rest of a response -----------------------------------------------------------------------------


FACTORS = [1.0, 0.99, 0.5, 0.0]


def test_returns_to_go_equal_verl():
    reinforce = load_verl().core_algos.compute_reinforce_plus_plus_outcome_advantage
    for case, batch in enumerate(ragged_batches()):
        gamma, rewards = FACTORS[case % 4], batch.normal(10.0 ** (case % 5 - 2))
        to_go = discounted_to_go(rewards, batch.mask, batch.cu_seqlens, gamma)
        # verl multiplies by the mask, so the rewards outside it do not count there either.
        padded = batch.padded(rewards), batch.padded(batch.mask).double()
        theirs = reinforce(*padded, config=types.SimpleNamespace(gamma=gamma))[1]
        torch.testing.assert_close(to_go, batch.packed(theirs), rtol=1e-11, atol=1e-10)


@pytest.mark.parametrize("factor", [0.0, 0.9, 1.0])
def test_discounted_sums_are_those_of_the_loop(factor):
    for batch in ragged_batches():
        noise = torch.where(batch.mask, batch.normal(), math.nan)
        sums = [f(noise, batch.mask, batch.cu_seqlens, factor) for f in (discounted_sums, discounted_to_go)]
        torch.testing.assert_close(*sums, rtol=1e-12, atol=1e-12)
        assert not sums[0][~batch.mask].any()
    nothing = torch.zeros(0, dtype=torch.bool)
    assert not len(discounted_sums(torch.zeros(0), nothing, torch.zeros(1, dtype=torch.long), factor))


# -- the critic --------------------------------------------------------------------------------------------------


def test_value_loss_equals_verl(monkeypatch):
    verl = load_verl()
    monkeypatch.setattr(verl.core_algos, "agg_loss", lambda loss_mat, **_: loss_mat)
    for case, batch in enumerate(ragged_batches()):
        scale, clip_range = 10.0 ** (case % 5 - 2), (0.0, 0.2, 0.5, 5.0)[case % 4]
        old, returns = batch.normal(scale), batch.normal(scale)
        values = (old + batch.normal(scale)).requires_grad_()
        losses, is_clipped = clipped_value_loss(values, old, returns, clip_range)
        padded = [batch.padded(field) for field in (values, returns, old, batch.mask.double())]
        matrix, fraction = verl.core_algos.compute_value_loss(*padded, clip_range)
        torch.testing.assert_close(losses, batch.packed(matrix), rtol=1e-12, atol=1e-12)
        gradients = [torch.autograd.grad(loss.sum(), values)[0] for loss in (losses, batch.packed(matrix))]
        torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)
        assert float(is_clipped[batch.mask].double().mean()) == pytest.approx(float(fraction), abs=1e-7)


def test_bad_values_are_rejected_and_targets_are_constants():
    ones = torch.ones(2)
    with pytest.raises(ValueError, match="one shape"):
        clipped_value_loss(ones, ones, ones[:1], 0.2)
    fields = [torch.randn(8, requires_grad=True) for _ in range(3)]
    clipped_value_loss(*fields, 0.2)[0].sum().backward()
    assert fields[0].grad is not None and fields[1].grad is None and fields[2].grad is None


def test_explained_variance_closed_forms():
    returns = torch.tensor([1.0, 2.0, 4.0, 8.0])
    mask = torch.ones(4, dtype=torch.bool)

    def of(values, targets=returns, valid=mask):
        return explained_variance(explained_variance_moments(values, targets, valid))

    assert of(returns) == 1.0
    assert of(returns + 5) == 1.0
    assert of(torch.full((4,), 3.0)) == pytest.approx(0.0, abs=1e-12)
    assert of(-returns) == pytest.approx(-3.0)
    assert of(torch.randn(4), torch.full((4,), 0.1)) == 0.0
    assert of(torch.randn(4), valid=torch.tensor([True, False, False, False])) == 0.0
    assert of(torch.randn(4), valid=torch.zeros(4, dtype=torch.bool)) == 0.0


def test_rounding_of_equal_returns_explains_nothing():
    draw = torch.Generator().manual_seed(0)
    for constant in (0.1, 0.7, 1e-9, 12345.678):
        returns = torch.full((4999,), constant, dtype=torch.float64)
        values = torch.randn(4999, generator=draw, dtype=torch.float64)
        parts = zip(values.split(97), returns.split(97))
        moments = sum(explained_variance_moments(v, r, torch.ones_like(r, dtype=torch.bool)) for v, r in parts)
        assert explained_variance(moments) == 0.0
