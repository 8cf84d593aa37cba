"""Policy losses of single tokens: against verl, with gradients; known cases."""

import math

import pytest
import torch

from megarl.algorithms.policy_loss import ClipOptions, PolicyTokens
from megarl.algorithms.policy_losses.single_tokens import SapoOptions, cispo, ppo_clip, reinforce, sapo
from tests.references.ragged import ragged_batches
from tests.references.verl_policy_losses import policy_tokens, verl_loss


def one_response(logprobs, old, advantages):
    """A batch of one response without a prompt."""
    mask = torch.ones(logprobs.shape, dtype=torch.bool)
    return PolicyTokens(logprobs, old, advantages, mask, torch.tensor([0, len(logprobs)]))


def cases():
    """Ratios from near 1 to beyond what exp can hold, symmetric and asymmetric clips, with and without dual clip."""
    for case, batch in enumerate(ragged_batches()):
        old, advantages = -batch.normal().abs(), batch.normal(10.0 ** (case % 3 - 1))
        advantages[::7] = 0.0
        logprobs = old + batch.normal((0.01, 0.2, 1.0, 10.0, 800.0)[case % 5])
        clip_low, clip_high = ((0.2, 0.2), (0.2, 0.28), (0.0, 0.1), (0.5, 3.0))[case % 4]
        clip = ClipOptions(clip_low, clip_high, (None, 3.0, 1.5)[case % 3])
        yield batch, policy_tokens(batch, logprobs.requires_grad_(), old, advantages), clip


def assert_same(ours, theirs, logprobs):
    """Values and gradients of each token's loss; returns our gradient."""
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    gradients = [torch.autograd.grad(loss.sum(), logprobs)[0] for loss in (ours, theirs)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)
    return gradients[0]


def test_ppo_clip_equals_verl():
    for batch, tokens, clip in cases():
        terms = ppo_clip(tokens, clip)
        theirs, metrics = verl_loss("vanilla", batch, tokens, clip)
        gradient = assert_same(terms.loss, theirs, tokens.logprobs)
        assert not gradient[terms.clipped].any()
        fraction = float(terms.clipped[batch.mask].double().mean())
        assert fraction == pytest.approx(metrics["actor/pg_clipfrac"] + metrics["actor/pg_clipfrac_lower"], abs=1e-7)
        kl = float(terms.approx_kl[batch.mask].clamp(-20, 20).mean())
        assert kl == pytest.approx(metrics["actor/ppo_kl"], rel=1e-6, abs=1e-6)


def test_cispo_equals_verl_and_keeps_the_gradient_of_clipped_tokens():
    for batch, tokens, clip in cases():
        terms = cispo(tokens, clip)
        theirs, metrics = verl_loss("cispo", batch, tokens, clip)
        gradient = assert_same(terms.loss, theirs, tokens.logprobs)
        fraction = float(terms.clipped[batch.mask].double().mean())
        assert fraction == pytest.approx(metrics["actor/pg_clipfrac"], abs=1e-7)
        ratio = (tokens.logprobs - tokens.old_logprobs).detach().clamp(-20, 20).exp()
        weights = torch.tensor([min(max(r, 1 - clip.low), 1 + clip.high) for r in ratio.tolist()], dtype=torch.float64)
        torch.testing.assert_close(gradient, -weights * tokens.advantages, rtol=1e-12, atol=1e-12)


def test_cispo_without_a_lower_bound():
    tokens = one_response(torch.tensor([-9.0, -1.0, -0.1]), torch.tensor([-1.0, -1.0, -5.0]), torch.ones(3))
    terms = cispo(tokens, ClipOptions(low=1.0, high=2.0))
    torch.testing.assert_close(terms.loss, torch.tensor([9.0 * math.exp(-8.0), 1.0, 0.3]))
    assert terms.clipped.tolist() == [False, False, True]


def test_reinforce_equals_verl():
    for batch, tokens, clip in cases():
        terms = reinforce(tokens, None)
        theirs, metrics = verl_loss("reinforce", batch, tokens, clip)
        assert_same(terms.loss, theirs, tokens.logprobs)
        assert not terms.clipped.any() and terms.clipped.shape == tokens.logprobs.shape
        kl = float(terms.approx_kl[batch.mask].mean())
        assert kl == pytest.approx(metrics["actor/ppo_kl"], rel=1e-6, abs=1e-6)


def test_sapo_equals_verl():
    for case, (batch, tokens, clip) in enumerate(cases()):
        tau_pos, tau_neg = ((1.0, 1.05), (0.3, 2.0), (5.0, 5.0))[case % 3]
        terms = sapo(tokens, SapoOptions(tau_pos, tau_neg))
        theirs, _ = verl_loss("sapo", batch, tokens, clip, tau_pos=tau_pos, tau_neg=tau_neg)
        assert_same(terms.loss, theirs, tokens.logprobs)
        assert not terms.clipped.any()
