"""Clipped policy loss: against verl and a case-by-case reference, gradients, exact zeros, extreme ratios."""

import math

import pytest
import torch

from megarl.algorithms.policy_loss import ppo_clip
from tests.references.ragged import ragged_batches
from tests.references.verl_core_algos import load_verl


class VerlConfig:
    """What verl's loss asks of its settings."""

    global_batch_info: dict = {}

    def __init__(self, clip_low, clip_high, dual_clip):
        self.clip_ratio, self.clip_ratio_low, self.clip_ratio_high = clip_low, clip_low, clip_high
        self.dual_clip = dual_clip

    def get(self, name, default):
        return {"clip_ratio_c": self.dual_clip}.get(name, default)


def loss_by_cases(log_ratio, advantage, clip_low, clip_high, dual_clip):
    """The loss of one token from the case table of PPO, and whether a bound holds it."""
    ratio = math.exp(min(max(log_ratio, -20.0), 20.0))
    if advantage > 0 and ratio > 1 + clip_high:
        return -advantage * (1 + clip_high), True
    if advantage < 0 and ratio < 1 - clip_low:
        return -advantage * (1 - clip_low), True
    if advantage < 0 and dual_clip is not None and ratio > dual_clip:
        return -advantage * dual_clip, True
    return -advantage * ratio, False


def cases():
    """Ratios from near 1 to beyond what exp can hold, symmetric and asymmetric clips, with and without dual clip."""
    for case, batch in enumerate(ragged_batches()):
        old, advantages = -batch.normal().abs(), batch.normal(10.0 ** (case % 3 - 1))
        advantages[::7] = 0.0
        logprobs = old + batch.normal((0.01, 0.2, 1.0, 10.0, 800.0)[case % 5])
        clip_low, clip_high = ((0.2, 0.2), (0.2, 0.28), (0.0, 0.1), (0.5, 3.0))[case % 4]
        yield batch, logprobs, old, advantages, (clip_low, clip_high, (None, 3.0, 1.5)[case % 3])


def test_loss_equals_verl_and_the_case_table(monkeypatch):
    verl = load_verl()
    monkeypatch.setattr(verl.core_algos, "agg_loss", lambda loss_mat, **_: loss_mat)
    for batch, logprobs, old, advantages, (clip_low, clip_high, dual_clip) in cases():
        logprobs.requires_grad_()
        terms = ppo_clip(logprobs, old, advantages, clip_low, clip_high, dual_clip)
        rows = zip((logprobs.detach() - old).tolist(), advantages.tolist())
        losses, clipped = zip(*(loss_by_cases(*row, clip_low, clip_high, dual_clip) for row in rows))
        expected = torch.tensor(losses, dtype=torch.float64)
        torch.testing.assert_close(terms.loss.detach(), expected, rtol=1e-12, atol=1e-12)
        assert terms.clipped.tolist() == list(clipped)

        config = VerlConfig(clip_low, clip_high, 1e300 if dual_clip is None else dual_clip)
        padded = [batch.padded(field) for field in (old, logprobs, advantages, batch.mask.double())]
        matrix, metrics = verl.core_algos.compute_policy_loss_vanilla(*padded, config=config)
        torch.testing.assert_close(terms.loss, batch.packed(matrix), rtol=1e-12, atol=1e-12)
        gradients = [torch.autograd.grad(loss.sum(), logprobs)[0] for loss in (terms.loss, batch.packed(matrix))]
        torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)
        fraction = float(terms.clipped[batch.mask].double().mean())
        assert fraction == pytest.approx(metrics["actor/pg_clipfrac"] + metrics["actor/pg_clipfrac_lower"], abs=1e-7)
        kl = float(terms.approx_kl[batch.mask].clamp(-20, 20).mean())
        assert kl == pytest.approx(metrics["actor/ppo_kl"], rel=1e-6, abs=1e-6)


def test_same_logprobs_give_exact_numbers():
    logprobs = (-30 * torch.rand(1000)).requires_grad_()
    advantages = torch.randn(1000)
    terms = ppo_clip(logprobs, logprobs.detach().clone(), advantages, 0.2, 0.2, dual_clip=3.0)
    assert torch.equal(terms.approx_kl, torch.zeros(1000)) and not terms.clipped.any()
    assert torch.equal(terms.loss.detach(), -advantages)
    terms.loss.sum().backward()
    assert torch.equal(logprobs.grad, -advantages)


def test_known_losses():
    ratios = torch.tensor([0.5, 0.5, 2.0, 2.0, 5.0, 1.1])
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, -1.0, 1.0])
    terms = ppo_clip(ratios.log(), torch.zeros(6), advantages, 0.2, 0.3, dual_clip=3.0)
    torch.testing.assert_close(terms.loss, torch.tensor([-0.5, 0.8, -1.3, 2.0, 3.0, -1.1]))
    assert terms.clipped.tolist() == [False, True, True, False, True, False]
    torch.testing.assert_close(terms.approx_kl, -ratios.log())


def test_gradcheck_and_no_gradient_where_clipped():
    generator = torch.Generator().manual_seed(1)
    old = torch.randn(200, generator=generator, dtype=torch.float64)
    log_ratio = 1.5 * torch.randn(200, generator=generator, dtype=torch.float64)
    advantages = torch.randn(200, generator=generator, dtype=torch.float64)
    ratio = log_ratio.exp()
    smooth = torch.stack([(ratio - kink).abs() for kink in (0.8, 1.3, 2.0)]).amin(0) > 1e-3
    logprobs = (old + log_ratio)[smooth].requires_grad_()
    old, advantages = old[smooth], advantages[smooth]
    assert torch.autograd.gradcheck(lambda x: ppo_clip(x, old, advantages, 0.2, 0.3, 2.0).loss, logprobs)
    terms = ppo_clip(logprobs, old, advantages, 0.2, 0.3, 2.0)
    terms.loss.sum().backward()
    assert terms.clipped.any() and not logprobs.grad[terms.clipped].any()
    assert logprobs.grad[~terms.clipped].all()


def test_infinite_ratios_give_finite_losses_and_gradients():
    logprobs = torch.tensor([1000.0, 1000.0, 1000.0, -1000.0, -1000.0], requires_grad=True)
    advantages = torch.tensor([1.0, -1.0, 0.0, 1.0, -1.0])
    terms = ppo_clip(logprobs, torch.zeros(5), advantages, 0.2, 0.2)
    terms.loss.sum().backward()
    assert terms.loss.isfinite().all() and torch.equal(logprobs.grad, torch.zeros(5))
    assert terms.approx_kl.tolist() == [-1000.0, -1000.0, -1000.0, 1000.0, 1000.0]


def test_old_logprobs_and_advantages_are_constants():
    fields = [torch.randn(8, requires_grad=True) for _ in range(3)]
    terms = ppo_clip(*fields, 0.2, 0.2)
    terms.loss.sum().backward()
    assert fields[0].grad is not None and fields[1].grad is None and fields[2].grad is None
    assert not terms.approx_kl.requires_grad


def test_bad_arguments_are_refused():
    ones = torch.ones(2)
    for low, high in ((-0.1, 0.2), (0.2, -0.1), (math.nan, 0.2)):
        with pytest.raises(ValueError, match="clip range must be >= 0"):
            ppo_clip(ones, ones, ones, low, high)
    with pytest.raises(ValueError, match="dual_clip must be > 1"):
        ppo_clip(ones, ones, ones, 0.2, 0.2, 1.0)
    with pytest.raises(ValueError, match=r"logprobs \[2\], old_logprobs \[1\]"):
        ppo_clip(ones, ones[:1], ones, 0.2, 0.2)
