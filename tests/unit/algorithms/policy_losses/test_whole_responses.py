"""GSPO, GSPO-token and GMPO: against verl and plain arithmetic, multi-turn masks, kinks of the clip.

REAL: its gradient is that of the classification loss of a plain loop, and does not depend on ranks.
"""

import itertools
import math

import pytest
import torch

from megarl.algorithms.aggregation import aggregate, local_counts
from megarl.algorithms.packed import broadcast_to_tokens
from megarl.algorithms.policy_loss import ClipOptions, PolicyTokens
from megarl.algorithms.policy_losses.whole_responses import RealOptions, gmpo, gspo, gspo_token, real, real_advantages
from tests.references.ragged import ragged_batches, ragged_steps
from tests.references.verl_policy_losses import policy_tokens, verl_loss

EXACT = {"rtol": 1e-12, "atol": 1e-12}


def cases(scales=(0.01, 0.2, 1.0, 10.0, 800.0), advantage_of_token=False):
    """Batches with one advantage a response (some are 0), or one a token."""
    for case, batch in enumerate(ragged_batches()):
        old, advantages = -batch.normal().abs(), batch.normal(10.0 ** (case % 3 - 1))
        if not advantage_of_token:
            of_sequence = advantages[batch.cu_seqlens[:-1]]
            of_sequence[case % 9 :: 4] = 0.0
            advantages = of_sequence.repeat_interleave(torch.tensor(batch.lengths))
        logprobs = (old + batch.normal(scales[case % 5])).requires_grad_()
        clip = ClipOptions(*((0.2, 0.2), (3e-4, 4e-4), (0.0, 0.1), (0.5, 3.0))[case % 4])
        yield batch, policy_tokens(batch, logprobs, old, advantages), clip


def responses(batch, *fields):
    """For each sequence the lists of the response tokens' entries, one list a field."""
    for start, stop in itertools.pairwise(batch.cu_seqlens.tolist()):
        yield [field[start:stop][batch.mask[start:stop]].tolist() for field in fields]


def gradient_of(losses, tokens, weights):
    """Gradient of the weighted sum of the response tokens' losses."""
    kept = torch.where(tokens.response_mask, losses * weights, 0.0)
    return torch.autograd.grad(kept.sum(), tokens.logprobs)[0]


def test_gspo_equals_verl_for_every_weight_of_a_response():
    for batch, tokens, clip in cases():
        weights = broadcast_to_tokens(batch.normal()[: len(batch.lengths)], batch.mask, batch.cu_seqlens)
        theirs, metrics = verl_loss("gspo", batch, tokens, clip)
        their_gradient = gradient_of(theirs, tokens, weights)
        for loss in (gspo, gspo_token):
            terms = loss(tokens, clip)
            torch.testing.assert_close(terms.loss[batch.mask], theirs[batch.mask], **EXACT)
            torch.testing.assert_close(gradient_of(terms.loss, tokens, weights), their_gradient, **EXACT)
            fraction = float(terms.clipped[batch.mask].double().mean())
            assert fraction == pytest.approx(metrics["actor/pg_clipfrac"], abs=1e-7)
            kl = float(terms.approx_kl[batch.mask].mean())
            assert kl == pytest.approx(metrics["actor/ppo_kl"], rel=1e-6, abs=1e-6)


def test_gspo_token_equals_verl_with_an_advantage_for_each_token():
    for batch, tokens, clip in cases(advantage_of_token=True):
        terms, (theirs, metrics) = gspo_token(tokens, clip), verl_loss("gspo", batch, tokens, clip)
        torch.testing.assert_close(terms.loss[batch.mask], theirs[batch.mask], **EXACT)
        gradients = [gradient_of(losses, tokens, torch.ones(())) for losses in (terms.loss, theirs)]
        torch.testing.assert_close(*gradients, **EXACT)
        assert float(terms.clipped[batch.mask].double().mean()) == pytest.approx(metrics["actor/pg_clipfrac"], abs=1e-7)


def test_gspo_equals_the_formula():
    """Also with an advantage for each token, of which the response takes the mean."""
    for case in (*cases(), *cases(advantage_of_token=True)):
        batch, tokens, clip = case
        losses, clipped = [], []
        fields = (tokens.logprobs.detach(), tokens.old_logprobs, tokens.advantages)
        for logprobs, old, advantages in responses(batch, *fields):
            number = max(len(old), 1)
            ratio = math.exp(min((math.fsum(logprobs) - math.fsum(old)) / number, 10.0))
            advantage = math.fsum(advantages) / number
            bounded = -advantage * min(max(ratio, 1 - clip.low), 1 + clip.high)
            losses += [max(-advantage * ratio, bounded)] * len(old)
            clipped += [bounded > -advantage * ratio] * len(old)
        terms, expected = gspo(tokens, clip), torch.tensor(losses, dtype=torch.float64)
        torch.testing.assert_close(terms.loss[batch.mask].detach(), expected, rtol=1e-11, atol=1e-12)
        assert terms.clipped[batch.mask].tolist() == clipped


def test_gmpo_equals_the_formula():
    for case in (*cases(), *cases(advantage_of_token=True)):
        batch, tokens, clip = case
        losses, clipped = [], []
        fields = (tokens.logprobs.detach() - tokens.old_logprobs, tokens.advantages)
        for log_ratios, advantages in responses(batch, *fields):
            held = [
                0.0 if a == 0 else (min(d, clip.high) if a > 0 else max(d, -clip.low))
                for d, a in zip(log_ratios, advantages)
            ]
            number = max(len(held), 1)
            ratio = math.exp(min(math.fsum(held) / number, 20.0))
            losses += [-math.fsum(advantages) / number * ratio] * len(held)
            clipped += [h != d and a != 0 for h, d, a in zip(held, log_ratios, advantages)]
        terms, expected = gmpo(tokens, clip), torch.tensor(losses, dtype=torch.float64)
        torch.testing.assert_close(terms.loss[batch.mask].detach(), expected, rtol=1e-11, atol=1e-12)
        assert terms.clipped[batch.mask].tolist() == clipped


@pytest.mark.parametrize("advantage_of_token", [False, True])
def test_gmpo_equals_verl(advantage_of_token, monkeypatch):
    """verl differs in three ways: it sets no limit to the mean, adds 1e-8 to the number of tokens (so the tolerance),
    and has sequences without response tokens count in the mean over sequences."""
    monkeypatch.setitem(gmpo.__globals__, "LOG_RATIO_LIMIT", math.inf)
    for batch, tokens, clip in cases((0.01, 0.2, 1.0, 3.0, 10.0), advantage_of_token):
        terms, counts = gmpo(tokens, clip), local_counts(batch.mask, batch.cu_seqlens)
        mean = aggregate(terms.loss, batch.mask, batch.cu_seqlens, "seq-mean-token-mean", counts)
        mean = mean * counts[1] / len(batch.lengths)
        theirs, _ = verl_loss("geo_mean", batch, tokens, clip, mode="none: it aggregates by itself")
        torch.testing.assert_close(mean, theirs, rtol=1e-6, atol=1e-6)
        gradients = [torch.autograd.grad(loss, tokens.logprobs)[0] for loss in (mean, theirs)]
        torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("loss", [gspo, gspo_token, gmpo])
def test_observation_tokens_have_no_effect(loss):
    for batch, tokens, clip in cases(advantage_of_token=True):
        noisy = [
            torch.where(batch.mask, field.detach(), batch.normal(100.0))
            for field in (tokens.logprobs, tokens.old_logprobs, tokens.advantages)
        ]
        other = PolicyTokens(noisy[0].requires_grad_(), *noisy[1:], batch.mask, batch.cu_seqlens)
        terms, others = loss(tokens, clip), loss(other, clip)
        assert torch.equal(terms.loss[batch.mask], others.loss[batch.mask])
        assert torch.equal(terms.clipped[batch.mask], others.clipped[batch.mask])
        gradients = [gradient_of(each.loss, of, torch.ones(())) for each, of in ((terms, tokens), (others, other))]
        assert torch.equal(*gradients) and not gradients[1][~batch.mask].any()


def test_a_long_float32_response_keeps_its_ratio():
    """A mean over 20,000 tokens: summed in float32, log s would be wrong in the sixth digit."""
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(20_000, generator=generator)
    logprobs = old + 0.3 + 1e-3 * torch.randn(20_000, generator=generator)
    mask = torch.ones(20_000, dtype=torch.bool)
    terms = gspo(PolicyTokens(logprobs, old, -torch.ones(20_000), mask, torch.tensor([0, 20_000])), ClipOptions(1, 1))
    exact = math.exp(math.fsum((logprobs - old).tolist()) / 20_000)
    assert terms.loss.dtype == torch.float32
    assert terms.loss[0].item() == pytest.approx(exact, abs=1.3e-7)  # half a unit in the last place is 6e-8


# -- REAL --------------------------------------------------------------------------------------------------------


def comparisons():
    """(step, old log-probs, log-probs, advantages of tokens, τ); some responses are neither good nor bad."""
    for seed, step in enumerate(ragged_steps(lone=False)):
        batch = step.batch
        old, verdicts = -batch.normal().abs(), torch.randint(-1, 2, (len(batch.lengths),), generator=batch.generator)
        sizes = (0.1 + torch.rand(len(verdicts), generator=batch.generator).double()) * verdicts
        advantages = sizes.repeat_interleave(torch.tensor(batch.lengths))
        logprobs = old + batch.normal((0.0, 0.3, 1.0, 3.0)[seed % 4])
        yield step, old, logprobs, advantages, (0.5, 1.0, 0.05)[seed % 3]


def objective(step, old, logprobs, advantages, tau):
    """Mean over groups of log(1 + Σ₊ e^{−s/τ}) + log(1 + Σ₋ e^{s/τ}); without both kinds 0."""
    batch, of_groups = step.batch, {}
    rows = (field.split(batch.lengths) for field in (logprobs - old, advantages, batch.mask))
    for group, log_ratio, its_advantages, mask in zip(step.groups.tolist(), *rows, strict=True):
        if mask.any():
            of_groups.setdefault(group, []).append((log_ratio[mask].mean() / tau, float(its_advantages[0])))
    total = torch.zeros((), dtype=torch.float64)
    number = sum(map(len, of_groups.values()))
    for rows in of_groups.values():
        good, bad = [-s for s, a in rows if a > 0], [s for s, a in rows if a < 0]
        if good and bad:  # a group weighs its responses, which is the mean over groups where those are equally many
            nothing = torch.zeros(1, dtype=torch.float64)
            total = total + len(rows) / number * sum(
                torch.logsumexp(torch.stack([*nothing, *x]), 0) for x in (good, bad)
            )
    return total


def of_ranks(step, log_ratios, advantages, is_on_first):
    """The inputs of each of two ranks, to which the step's responses are dealt."""
    on_first = torch.tensor(is_on_first)
    tokens, lengths = on_first.repeat_interleave(torch.tensor(step.batch.lengths)), torch.tensor(step.batch.lengths)
    for its_tokens, its in ((tokens, on_first), (~tokens, ~on_first)):
        borders = torch.cat([torch.zeros(1, dtype=torch.int64), lengths[its].cumsum(0)])
        ratios, mask = log_ratios[its_tokens], step.batch.mask[its_tokens]
        of_rank = PolicyTokens(ratios, torch.zeros_like(ratios), advantages[its_tokens], mask, borders)
        yield its_tokens, (of_rank, step.groups[its], int(step.groups.max()) + 1)


def test_the_gradient_is_that_of_the_classification():
    compared = 0
    for step, old, start, advantages, tau in comparisons():
        batch, groups = step.batch, int(step.groups.max()) + 1
        logprobs = start.clone().requires_grad_()
        tokens = PolicyTokens(start, old, advantages, batch.mask, batch.cu_seqlens)
        found = real_advantages(tokens, RealOptions(tau), step.groups, groups, lambda x: x)
        losses = real(policy_tokens(batch, logprobs, old, found), RealOptions(tau)).loss
        where = batch.mask, batch.cu_seqlens
        total = aggregate(losses, *where, "seq-mean-token-mean", local_counts(*where), 1.0)
        (ours,) = torch.autograd.grad(total, logprobs)
        expected = objective(step, old, logprobs, advantages, tau)
        theirs = torch.autograd.grad(expected, logprobs)[0] if expected.requires_grad else torch.zeros_like(ours)
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
        assert not found[~batch.mask].any() and found.isfinite().all()
        compared += int(theirs.any())
    assert compared > 50


def test_ranks_compare_as_one_rank():
    for case, (step, old, logprobs, advantages, tau) in enumerate(comparisons()):
        count, generator = len(step.batch.lengths), torch.Generator().manual_seed(case)
        is_on_first = (torch.rand(count, generator=generator) < (0.0, 0.5, 1.0)[case % 3]).tolist()
        (both, whole), _ = of_ranks(step, logprobs - old, advantages, [True] * count)
        ranks, tables, options = [], [], RealOptions(tau)
        expected = real_advantages(whole[0], options, *whole[1:], lambda x: x)
        for _, (tokens, *of_groups) in of_ranks(step, logprobs - old, advantages, is_on_first):
            real_advantages(tokens, options, *of_groups, lambda x: tables.append(x) or x)
        for at, (tokens, *of_groups) in of_ranks(step, logprobs - old, advantages, is_on_first):
            ranks.append((at, real_advantages(tokens, options, *of_groups, lambda _: sum(tables))))
        found = torch.zeros_like(expected)
        for at, its in ranks:
            found[at] = its
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("scale", [1e4, 1e30])
def test_extreme_ratios_compare_finitely(scale):
    log_ratios, mask = torch.tensor([scale, -scale, scale, -scale]), torch.ones(4, dtype=torch.bool)
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0])
    tokens = PolicyTokens(log_ratios, torch.zeros(4), advantages, mask, torch.arange(5))
    found = real_advantages(tokens, RealOptions(0.01), torch.zeros(4, dtype=torch.int64), 1, lambda x: x)
    assert found.isfinite().all() and found.tolist() == pytest.approx([0.0, 400.0, -400.0, 0.0])
