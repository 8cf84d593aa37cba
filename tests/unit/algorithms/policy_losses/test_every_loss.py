"""Properties of every policy loss: exact zeros, finite results, gradients, independent sequences, constant inputs."""

import dataclasses
import itertools

import pytest
import torch

from megarl.algorithms.aggregation import AGGREGATIONS, aggregate, local_counts
from megarl.algorithms.policy_loss import (
    ClipOptions,
    PolicyTokens,
)
from megarl.algorithms.policy_losses import POLICY_LOSSES
from tests.references.ragged import ragged_batches
from tests.references.verl_policy_losses import policy_tokens

EVERY_LOSS = pytest.mark.parametrize("name", POLICY_LOSSES)
CLIP = ClipOptions(0.2, 0.3, dual=2.0)


# Option of any loss -> another value than in `options_of`, or in the defaults.
OTHERS = {
    "low": 0.4, "high": 0.6, "dual": None, "tau_positive": 0.5, "tau_negative": 2.0, "cap": 1.3, "k_positive": 1.0,
    "lambda_positive": 1.0, "k_negative": 1.0, "lambda_negative": 1.0, "half_life": 2.0, "range": 0.6,
    "threshold": 0.5, "share": 0.5, "least": -0.5, "most": 0.5, "coefficient": 3.0, "tau": 2.0,
}  # fmt: skip
# Losses −sg[weight]·A·log π_θ.
WEIGHTED = ("cispo", "dppo-tv", "dppo-kl", "rollout-is", "vespo", "topr")


def options_of(name, clip=CLIP):
    """A clip for the losses that have one, the default options for the others."""
    default = POLICY_LOSSES[name].options
    if name in ("fipo", "m2po", "clip-cov"):
        return dataclasses.replace(default, **dataclasses.asdict(clip))
    return clip if isinstance(clip, type(default)) else default


def test_the_losses_and_their_flags():
    clip = ["clip-range", "clip-range-high"]
    assert {name: list(loss.flags()) for name, loss in POLICY_LOSSES.items()} == {
        "ppo-clip": [*clip, "dual-clip"],
        "gspo": clip,
        "gspo-token": clip,
        "cispo": clip,
        "gmpo": clip,
        "reinforce": [],
        "sapo": ["sapo-tau-positive", "sapo-tau-negative"],
        "dppo-tv": ["dppo-tv-low", "dppo-tv-high", "dppo-tv-cap"],
        "dppo-kl": ["dppo-kl-low", "dppo-kl-high", "dppo-kl-cap"],
        "rollout-is": clip,
        "vespo": ["vespo-k-positive", "vespo-lambda-positive", "vespo-k-negative", "vespo-lambda-negative"],
        "topr": ["topr-cap"],
        "luspo": clip,
        "m2po": [*clip, "dual-clip", "m2po-threshold"],
        "clip-cov": [*clip, "dual-clip", "clip-cov-share", "clip-cov-least", "clip-cov-most"],
        "kl-cov": ["kl-cov-share", "kl-cov-coefficient"],
        "fipo": [*clip, "dual-clip", "fipo-half-life", "fipo-range"],
        "real": ["real-tau"],
    }
    assert all(loss.name == name for name, loss in POLICY_LOSSES.items())


def _prepared(name, tokens, options):
    """The tokens with what a loss selects, or the advantages by which it compares, in a mini-batch of their own."""
    select, compare = POLICY_LOSSES[name].select, POLICY_LOSSES[name].compare
    if compare is not None:
        groups = torch.zeros(len(tokens.cu_seqlens) - 1, dtype=torch.int64)
        return dataclasses.replace(tokens, advantages=compare(tokens, options, groups, 1, lambda x: x))
    if select is None:
        return tokens
    drawn = torch.rand(len(tokens.logprobs), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    before = dataclasses.replace(tokens, logprobs=tokens.old_logprobs, rollout_logprobs=0.5 * tokens.old_logprobs)
    return dataclasses.replace(tokens, selected=select(before, options, drawn, lambda x: x))


@EVERY_LOSS
def test_every_option_is_read(name):
    """Each one changes the loss."""
    function, default = POLICY_LOSSES[name].function, options_of(name)
    for field in POLICY_LOSSES[name].flags().values():
        other, changed = dataclasses.replace(default, **{field.name: OTHERS[field.name]}), False
        for batch in ragged_batches()[:20]:
            old = batch.normal()
            tokens = policy_tokens(batch, old + batch.normal(), old, batch.normal())
            losses = [function(_prepared(name, tokens, options), options).loss for options in (default, other)]
            changed |= not losses[0].equal(losses[1])
        assert changed, field.name


@EVERY_LOSS
def test_before_any_update_the_ratio_is_exactly_one(name):
    """Loss and gradient then have a closed form to the last bit, in float32."""
    lengths, mask = torch.tensor([3, 5, 2]), torch.tensor([0, 1, 1, 0, 1, 1, 0, 1, 0, 0], dtype=torch.bool)
    borders = torch.cat([torch.zeros(1), lengths.cumsum(0)]).long()
    logprobs = (-30 * torch.rand(10)).requires_grad_()
    advantages = torch.tensor([0.5, -2.0, 0.0]).repeat_interleave(lengths)
    tokens = PolicyTokens(logprobs, logprobs.detach().clone(), advantages, mask, borders)
    terms = POLICY_LOSSES[name].function(tokens, options_of(name))
    assert torch.equal(terms.approx_kl, torch.zeros(10)) and not terms.clipped.any()
    assert not terms.approx_kl.requires_grad and terms.loss.dtype == torch.float32
    of_logprob = name in (*WEIGHTED, "reinforce", "real")
    expected = -advantages * logprobs.detach() if of_logprob else -advantages
    scale = torch.tensor([2.0, 3.0, 0.0]).repeat_interleave(lengths) if name == "luspo" else torch.ones(10)
    expected = expected * scale
    if name == "sapo":
        expected = expected * (4 / (2 * torch.where(advantages > 0, 1.0, 1.05)))
    assert torch.equal(terms.loss.detach()[mask], expected[mask])
    torch.where(mask, terms.loss, 0.0).sum().backward()
    gradient = torch.where(mask, -advantages * scale, 0.0)
    if name == "sapo":
        torch.testing.assert_close(logprobs.grad, gradient)
    else:
        # gspo and gmpo: the n tokens of a response each give −A/n to each other.
        torch.testing.assert_close(logprobs.grad, gradient, rtol=2e-7, atol=0)


@EVERY_LOSS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_ratios_give_finite_losses_and_gradients(name, dtype):
    sizes = (0.0, 1e-30, 20.0, 88.0, 710.0, 1e4)
    rows = [(sign * size, a) for size in sizes for sign in (1, -1) for a in (1.0, -1.0, 0.0, 1e4, -1e4)]
    differences, advantages = torch.tensor(rows, dtype=dtype).unbind(1)
    for borders in (torch.arange(len(rows) + 1), torch.tensor([0, len(rows)])):  # alone, and all in one response
        logprobs = differences.clone().requires_grad_()
        mask = torch.ones(len(rows), dtype=torch.bool)
        tokens = PolicyTokens(logprobs, torch.zeros(len(rows), dtype=dtype), advantages, mask, borders)
        terms = POLICY_LOSSES[name].function(tokens, options_of(name, ClipOptions(0.2, 0.3)))
        terms.loss.sum().backward()
        assert all(field.isfinite().all() for field in (terms.loss, logprobs.grad, terms.approx_kl))


@EVERY_LOSS
@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_empty_responses_give_nothing(name, mode):
    lengths = [2, 0, 3]
    borders = torch.tensor([0, *itertools.accumulate(lengths)])
    for mask in (torch.zeros(5, dtype=torch.bool), torch.tensor([False, False, False, True, True])):
        logprobs = torch.randn(5, requires_grad=True)
        tokens = PolicyTokens(logprobs, torch.randn(5), torch.randn(5), mask, borders)
        counts = local_counts(mask, borders)
        loss = aggregate(
            POLICY_LOSSES[name].function(tokens, options_of(name)).loss, mask, borders, mode, counts, norm=7.0
        )
        loss.backward()
        assert loss.isfinite() and logprobs.grad.isfinite().all() and not logprobs.grad[~mask].any()
        assert counts.tolist() == [mask.sum(), mask.any()]
        assert mask.any() or loss.item() == 0.0


@EVERY_LOSS
def test_sequences_do_not_affect_each_other(name):
    """Bit for bit: a micro-batch may hold any of the others."""
    for case, batch in enumerate(ragged_batches()[:100]):
        old = batch.normal()
        fields = [old + batch.normal((0.1, 1.0, 30.0)[case % 3]), old, batch.normal(), batch.mask]
        whole = POLICY_LOSSES[name].function(PolicyTokens(*fields, batch.cu_seqlens), options_of(name))
        for start, stop in itertools.pairwise(batch.cu_seqlens.tolist()):
            alone = PolicyTokens(*(field[start:stop] for field in fields), torch.tensor([0, stop - start]))
            terms = POLICY_LOSSES[name].function(alone, options_of(name))
            kept = batch.mask[start:stop]
            assert all(torch.equal(a[kept], b[start:stop][kept]) for a, b in zip(terms, whole))


@EVERY_LOSS
def test_only_the_logprobs_of_the_trained_policy_have_a_gradient(name):
    fields = [torch.randn(8, requires_grad=True) for _ in range(4)]
    mask, borders = torch.ones(8, dtype=torch.bool), torch.tensor([0, 5, 8])
    terms = POLICY_LOSSES[name].function(PolicyTokens(*fields[:3], mask, borders, fields[3]), options_of(name))
    terms.loss.sum().backward()
    assert fields[0].grad is not None and all(field.grad is None for field in fields[1:])
    assert not terms.approx_kl.requires_grad


LOG_RATIOS = torch.tensor([[0.9, -0.1], [-1.5, 0.1], [0.05, -0.6], [1.2, 0.4], [-0.35, -0.9]], dtype=torch.float64)


def smooth_tokens(number=40):
    """Log-ratios, and means of them over responses, that are far from every kink."""
    generator = torch.Generator().manual_seed(3)
    log_ratios = LOG_RATIOS.flatten().repeat(number // 10) + 0.01 * torch.rand(number, generator=generator).double()
    old, advantages = (torch.randn(number, generator=generator, dtype=torch.float64) for _ in range(2))
    mask = torch.rand(number, generator=generator) < 0.8
    borders = torch.tensor([0, 4, 5, 9, 20, 31, 31, number])
    return log_ratios, PolicyTokens(old + log_ratios, old, advantages, mask, borders)


def frozen(name, tokens):
    """The loss of `name` as a function of the log-probs whose stop-gradient parts stay at `tokens`."""

    def weighted(x):
        weights = POLICY_LOSSES[name].function(tokens, options_of(name)).loss.detach() / tokens.logprobs
        return weights * x

    def fipo(x):
        options = options_of(name)
        alone = dataclasses.replace(options, range=1e-300)  # holds the influence at 1
        plain = POLICY_LOSSES[name].function(tokens, alone).loss
        influence = POLICY_LOSSES[name].function(tokens, options).loss / plain
        fields = (tokens.old_logprobs, influence * tokens.advantages, tokens.response_mask, tokens.cu_seqlens)
        return POLICY_LOSSES["ppo-clip"].function(PolicyTokens(x, *fields), CLIP).loss

    def gspo_token(x):
        kept = [tokens.response_mask[a:b] for a, b in itertools.pairwise(tokens.cu_seqlens.tolist())]
        parts = (tokens.logprobs - tokens.old_logprobs).split(tokens.cu_seqlens.diff().tolist())
        means = [part[keep].mean().expand(len(part)) if keep.any() else 0 * part for part, keep in zip(parts, kept)]
        ratio = (torch.cat(means) + x - tokens.logprobs).exp()
        return torch.maximum(-tokens.advantages * ratio, -tokens.advantages * ratio.clamp(0.8, 1.3))

    def plain(x):
        fields = (tokens.old_logprobs, tokens.advantages, tokens.response_mask, tokens.cu_seqlens)
        return POLICY_LOSSES[name].function(PolicyTokens(x, *fields), options_of(name)).loss

    others = dict.fromkeys(WEIGHTED, weighted) | {"gspo-token": gspo_token, "fipo": fipo}
    return others.get(name, plain)


@EVERY_LOSS
@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_gradcheck(name, mode):
    """Of the aggregated loss. Finite differences ignore stop-gradients: if a loss has one, they check the function
    with those parts frozen, and the loss has to have its value and its gradient."""
    _, tokens = smooth_tokens()
    mask, borders = tokens.response_mask, tokens.cu_seqlens
    counts = local_counts(mask, borders)

    def total(losses):
        return aggregate(losses, mask, borders, mode, counts, norm=7.0)

    function = frozen(name, tokens)
    logprobs = tokens.logprobs.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: total(function(x)), logprobs)
    inputs = PolicyTokens(logprobs, tokens.old_logprobs, tokens.advantages, mask, borders)
    losses = total(POLICY_LOSSES[name].function(inputs, options_of(name)).loss), total(function(logprobs))
    torch.testing.assert_close(*losses, rtol=1e-12, atol=1e-14)
    gradients = [torch.autograd.grad(loss, logprobs)[0] for loss in losses]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-14)
    assert gradients[0][mask].any() and not gradients[0][~mask].any()


def test_gradcheck_stands_clear_of_the_kinks():
    log_ratios, tokens = smooth_tokens()
    spans = list(itertools.pairwise(tokens.cu_seqlens.tolist()))
    means = [log_ratios[a:b][tokens.response_mask[a:b]].mean() for a, b in spans if tokens.response_mask[a:b].any()]
    places = torch.cat([log_ratios, torch.stack(means)])
    kinks = torch.tensor([0.8, 1.3, 2.0]).log().tolist() + [-0.2, 0.3]
    assert all((places - kink).abs().min() > 1e-3 for kink in kinks)
    outside = [(places < -0.23).any(), (places > 0.31).any(), ((places > -0.2) & (places < 0.26)).any()]
    assert all(outside), "every side of the clip is there"
