"""Losses of the policy that generated, or of whole responses: against verl, and loops over their formulas."""

import itertools
import math

import pytest
import torch

from megarl.algorithms.policy_loss import ClipOptions, ClipRange
from megarl.algorithms.policy_losses.single_tokens import (
    DppoKlOptions,
    DppoTvOptions,
    FipoOptions,
    binary_kl,
    dppo_kl,
    dppo_tv,
    fipo,
    rollout_is,
)
from megarl.algorithms.policy_losses.whole_responses import ToprOptions, VespoOptions, luspo, topr, vespo
from tests.references.ragged import ragged_batches
from tests.references.verl_policy_losses import policy_tokens, verl_loss

CLIPS = ((0.2, 0.2), (0.2, 0.28), (0.05, 0.1), (0.5, 3.0))
LIMIT = 20.0


def cases(scales=(0.01, 0.2, 1.0, 10.0, 300.0)):
    """Batches whose three policies all differ; probabilities of all sizes, some of exactly 1; some advantages are 0."""
    for case, batch in enumerate(ragged_batches()):
        rollout = -batch.normal((0.1, 1.0, 5.0)[case % 3]).abs()
        logprobs = (rollout + batch.normal(scales[case % 5])).clamp(max=0.0)
        old = (rollout + batch.normal(0.3)).clamp(max=0.0)
        advantages = batch.normal(10.0 ** (case % 3 - 1))
        advantages[::7] = 0.0
        tokens = policy_tokens(batch, logprobs.requires_grad_(), old, advantages, rollout)
        yield batch, tokens, CLIPS[case % 4]


def responses(tokens):
    """For each sequence that has any the rows (log π, log π_old, log μ, A) of its response tokens."""
    fields = (tokens.logprobs.detach(), tokens.old_logprobs, tokens.rollout_logprobs, tokens.advantages)
    for start, stop in itertools.pairwise(tokens.cu_seqlens.tolist()):
        kept = tokens.response_mask[start:stop]
        yield list(zip(*(field[start:stop][kept].tolist() for field in fields), strict=True))


def held(number, limit=LIMIT):
    return min(max(number, -limit), limit)


def check(terms, tokens, expected, gradients=None, rtol=1e-10):
    """`expected`: (loss, clipped) of each response token; `gradients`: of the sum of their losses."""
    mask, (losses, clipped) = tokens.response_mask, zip(*expected, strict=True)
    close = dict(rtol=rtol, atol=1e-12)
    torch.testing.assert_close(terms.loss.detach()[mask], torch.tensor(losses, dtype=torch.float64), **close)
    assert terms.clipped[mask].tolist() == list(clipped)
    assert torch.equal(terms.approx_kl, (tokens.old_logprobs - tokens.logprobs).detach())
    if gradients is not None:
        (found,) = torch.autograd.grad(torch.where(mask, terms.loss, 0.0).sum(), tokens.logprobs)
        torch.testing.assert_close(found[mask], torch.tensor(gradients, dtype=torch.float64), **close)
        assert not found[~mask].any()


def check_weighted(terms, tokens, weights):
    """Of −sg[w]·A·log π: `weights` has (w, clipped) of each response token."""
    rows = list(itertools.chain(*responses(tokens)))
    expected = [(-w * a * logprob, clipped) for (w, clipped), (logprob, _, _, a) in zip(weights, rows, strict=True)]
    check(terms, tokens, expected, [-w * row[3] for (w, _), row in zip(weights, rows, strict=True)])


def coin_kl(p, q):
    """KL between coins that show heads with probabilities p and q."""
    terms = [(p, q), (1 - p, 1 - q)]
    return math.inf if any(a > 0 and b <= 0 for a, b in terms) else sum(a * math.log(a / b) for a, b in terms if a > 0)


@pytest.mark.parametrize("name", ["tv", "kl"])
def test_dppo_equals_the_formula(name):
    loss, kind = {"tv": (dppo_tv, DppoTvOptions), "kl": (dppo_kl, DppoKlOptions)}[name]
    some_masked = 0
    for _, tokens, (low, high) in cases():
        options, weights = kind(low, high, cap=3.0), []
        for logprob, _, rollout, a in itertools.chain(*responses(tokens)):
            p, mu = math.exp(logprob), math.exp(rollout)
            if name == "tv":
                is_kept = p - mu <= high if a > 0 else p - mu >= -low
            elif a > 0:
                is_kept = p <= mu or coin_kl(mu, p) <= high
            else:
                is_kept = p >= mu or coin_kl(mu, p) <= low
            weights.append((min(math.exp(held(logprob - rollout)), 3.0) * is_kept, not is_kept))
        check_weighted(loss(tokens, options), tokens, weights)
        some_masked += any(clipped for _, clipped in weights)
    assert some_masked > 50


@pytest.mark.parametrize("name", ["tv", "kl"])
def test_dppo_equals_verl(name):
    """verl's trainer gives the old policy's log-probs the name of the anchor; here μ is it. It adds 1e-8 in its KL, and
    clamps nothing there, so tokens whose probability rounds to 1 are left out."""
    loss, kind = {"tv": (dppo_tv, DppoTvOptions), "kl": (dppo_kl, DppoKlOptions)}[name]
    for batch, tokens, clip in cases():
        anchored = policy_tokens(batch, tokens.logprobs, tokens.rollout_logprobs, tokens.advantages)
        theirs, _ = verl_loss(f"dppo_{name}", batch, anchored, ClipOptions(*clip, dual=3.0))
        ours = loss(tokens, kind(*clip, cap=3.0)).loss
        sure = torch.maximum(tokens.logprobs.detach(), tokens.rollout_logprobs) > -1e-3
        kept = tokens.response_mask & ~(sure if name == "kl" else torch.zeros_like(sure))
        torch.testing.assert_close(ours[kept], theirs[kept], rtol=1e-10, atol=1e-12)
        gradients = [torch.autograd.grad(each[kept].sum(), tokens.logprobs)[0] for each in (ours, theirs)]
        torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)


def test_the_binary_kl_of_certain_tokens():
    logprobs, others = torch.tensor([0.0, 0.0, -1.0, -1.0, 1e-7]), torch.tensor([0.0, -1.0, 0.0, -1.0, 0.0])
    assert binary_kl(logprobs.double(), others.double()).tolist() == [0.0, 1.0, math.inf, 0.0, 0.0]


def test_rollout_is_equals_the_formula():
    for _, tokens, (low, high) in cases():
        weights = []
        for logprob, _, rollout, _ in itertools.chain(*responses(tokens)):
            ratio = math.exp(held(logprob - rollout))
            is_kept = 1 - low < ratio < 1 + high
            weights.append((ratio * is_kept, not is_kept))
        check_weighted(rollout_is(tokens, ClipRange(low, high)), tokens, weights)


def test_vespo_equals_the_formula():
    for case, (_, tokens, _) in enumerate(cases()):
        options = (VespoOptions(), VespoOptions(1.0, 2.0, 0.5, 4.0))[case % 2]
        weights = []
        for rows in responses(tokens):
            log_weight = held(math.fsum(row[0] - row[2] for row in rows))
            for *_, a in rows:
                k, decay = (
                    (options.k_positive, options.lambda_positive)
                    if a >= 0
                    else (options.k_negative, options.lambda_negative)
                )
                weights.append((math.exp(k * log_weight + decay * (1 - math.exp(log_weight))), False))
        check_weighted(vespo(tokens, options), tokens, weights)


def test_topr_equals_the_formula():
    for case, (_, tokens, _) in enumerate(cases()):
        cap, weights = (1.0, 0.5, 2.0)[case % 3], []
        for rows in responses(tokens):
            weight = math.exp(held(math.fsum(row[0] - row[2] for row in rows)))
            weights += [(1.0, False) if a >= 0 else (min(weight, cap), weight > cap) for *_, a in rows]
        check_weighted(topr(tokens, ToprOptions(cap)), tokens, weights)


def test_luspo_equals_the_formula():
    for _, tokens, clip in cases():
        expected, (low, high) = [], clip
        for rows in responses(tokens):
            number = len(rows)
            ratio = math.exp(min(math.fsum(row[0] - row[1] for row in rows) / max(number, 1), 10.0))
            a = math.fsum(row[3] for row in rows) / max(number, 1)
            plain, bounded = -a * ratio, -a * min(max(ratio, 1 - low), 1 + high)
            expected += [(number * max(plain, bounded), bounded > plain)] * number
        check(luspo(tokens, ClipRange(*clip)), tokens, expected)


def test_fipo_equals_the_formula():
    some_scaled = 0
    for case, (_, tokens, clip) in enumerate(cases()):
        dual, expected = (None, 3.0)[case % 2], []
        options = FipoOptions(*clip, dual=dual, half_life=(32.0, 2.0)[case % 2], range=0.2)
        factor = 2 ** (-1 / options.half_life)
        for rows in responses(tokens):
            logs = [row[0] - row[1] for row in rows]
            counted = [0.0 if dual is not None and log > math.log(dual) else log for log in logs]
            for t, (*_, a) in enumerate(rows):
                later = math.fsum(factor ** (k - t) * counted[k] for k in range(t, len(rows)))
                scaled = a * math.exp(min(max(later, 0.0), math.log(1.2)))
                ratio, some_scaled = math.exp(held(logs[t])), some_scaled + (scaled != a)
                plain, bounded = -scaled * ratio, -scaled * min(max(ratio, 1 - clip[0]), 1 + clip[1])
                loss, clipped = max(plain, bounded), bounded > plain
                if dual is not None and a < 0 and loss > -scaled * dual:
                    loss, clipped = -scaled * dual, True
                expected.append((loss, clipped))
        check(fipo(tokens, options), tokens, expected)
    assert some_scaled > 500


def test_without_log_probs_of_the_rollout_the_old_policy_generated():
    for _, (batch, tokens, _) in zip(range(20), cases((0.1,) * 5)):
        fields = (batch, tokens.logprobs, tokens.old_logprobs, tokens.advantages)
        without, given = (vespo(policy_tokens(*fields, mu), VespoOptions()) for mu in (None, tokens.old_logprobs))
        assert torch.equal(without.loss, given.loss)
        assert not torch.equal(vespo(tokens, VespoOptions()).loss[batch.mask], given.loss[batch.mask])
