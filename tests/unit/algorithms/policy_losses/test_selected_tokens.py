"""Tokens selected over a mini-batch: against sorts, verl and AReaL's definition; independent of ranks and order."""

import dataclasses
import itertools
import random
import types

import pytest
import torch

from megarl.algorithms.policy_loss import ClipOptions, PolicyTokens
from megarl.algorithms.policy_losses import POLICY_LOSSES
from megarl.algorithms.policy_losses.selected_tokens import (
    ClipCovOptions,
    KlCovOptions,
    M2poOptions,
    kl_cov,
    lowest_that_fit,
    masked_ppo_clip,
    random_keys,
    sort_keys,
)
from tests.references.ragged import ragged_batches
from tests.references.verl_policy_losses import policy_tokens, verl_loss

SELECTING = {"m2po": M2poOptions(threshold=0.02), "clip-cov": ClipCovOptions(share=0.2, least=0.0, most=5.0),
             "kl-cov": KlCovOptions(share=0.2)}  # fmt: skip


def alone(tensor):
    """Sum over the ranks of a world of one."""
    return tensor


def minibatch(batch) -> tuple[PolicyTokens, torch.Tensor]:
    """A mini-batch whose policies differ by rounding, a little and much, and its random numbers; NaN at prompts."""
    old, nothing = -batch.normal().abs(), torch.tensor(float("nan"), dtype=torch.float64)
    rollout = old + batch.normal(0.2) * (batch.normal() > 0)
    old, rollout, advantages = (torch.where(batch.mask, field, nothing) for field in (old, rollout, batch.normal()))
    drawn = torch.rand(len(old), generator=batch.generator, dtype=torch.float64)
    return PolicyTokens(old, old, advantages, batch.mask, batch.cu_seqlens, rollout), drawn


def selected_by(name: str, options, of_minibatch: tuple[PolicyTokens, torch.Tensor], total=alone) -> torch.Tensor:
    tokens, drawn = of_minibatch
    return POLICY_LOSSES[name].select(tokens, options, drawn, total)


def test_the_lowest_that_fit_are_those_of_a_sort():
    for case, batch in enumerate(ragged_batches()):
        values = batch.normal((1e-30, 1.0, 1e30)[case % 3]) * (batch.normal() > (-9, 0)[case % 2])  # some are equal
        keys = sort_keys(values, torch.rand(len(values), generator=batch.generator, dtype=torch.float64))
        order = sorted(batch.mask.nonzero().flatten().tolist(), key=lambda i: int(keys[i]))
        assert [float(values[i].float()) for i in order] == sorted(values[batch.mask].float().tolist())
        limit, squares = case % (len(order) + 2), values.float().double().square()

        def few(number, total):
            return number <= limit

        def small(number, total):
            return (total < number) | (number == 0)

        found = lowest_that_fit(keys, values, batch.mask, few, alone)
        assert found.nonzero().flatten().tolist() == sorted(order[:limit])
        by_size = sort_keys(squares, torch.zeros(len(values), dtype=torch.float64))
        kept = lowest_that_fit(by_size, squares, batch.mask, small, alone)
        ascending = squares[batch.mask].sort().values
        means = ascending.cumsum(0) / torch.arange(1, len(ascending) + 1)
        fitting = int((means < 1).long().cumprod(0).sum())
        assert int(kept.sum()) == fitting or squares[batch.mask].unique().numel() < len(order)
        assert not kept[~batch.mask].any()


def test_nothing_to_choose_from():
    keys, values = torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.float64)
    assert not len(lowest_that_fit(keys, values, keys.bool(), lambda n, _: n <= 1, alone))
    tokens, drawn = minibatch(ragged_batches()[0])
    empty = dataclasses.replace(tokens, response_mask=torch.zeros_like(tokens.response_mask))
    for name, options in SELECTING.items():
        assert not selected_by(name, options, (empty, drawn)).any()


@pytest.mark.parametrize("name", SELECTING)
def test_ranks_choose_what_one_rank_chooses(name):
    """The tokens are dealt to two ranks, whose sums meet round by round."""
    options, some = SELECTING[name], 0
    for case, batch in enumerate(ragged_batches()[:40]):
        (whole, drawn), draw = minibatch(batch), random.Random(case)
        expected = selected_by(name, options, (whole, drawn))
        on_first = torch.tensor([draw.random() < (0.0, 0.5, 1.0)[case % 3] for _ in whole.logprobs])
        fields = {name: x for name, x in vars(whole).items() if x is not None and name != "cu_seqlens"}
        parts = []
        for at in (on_first, ~on_first):
            borders = torch.tensor([0, int(at.sum())])
            parts.append((PolicyTokens(**{n: x[at] for n, x in fields.items()}, cu_seqlens=borders), drawn[at]))
        sums = []

        def recorded(part, sums=sums, parts=parts):
            """Runs a rank up to each of its sums, whose total is that of both ranks' contributions so far known."""
            given = iter(list(sums))
            asked = []

            def total(x):
                asked.append(x)
                known = next(given, None)
                return x if known is None else known

            return selected_by(name, options, part, total), asked

        for number in itertools.count():
            asked = [recorded(part)[1] for part in parts]
            if number == len(asked[0]):
                break
            sums.append(asked[0][number] + asked[1][number])
        found = torch.zeros_like(expected)
        found[on_first], found[~on_first] = (recorded(part)[0] for part in parts)
        assert torch.equal(found, expected)
        some += int(expected.sum())
    assert some > 20


def test_m2po_masks_until_the_mean_of_the_rest_is_below_its_bound():
    """As AReaL has it: the first place in the descending order whose rest has a mean below τ."""
    masked = 0
    for case, batch in enumerate(ragged_batches()):
        (tokens, drawn), threshold = minibatch(batch), (0.001, 0.02, 0.2)[case % 3]
        selected = selected_by("m2po", M2poOptions(threshold=threshold), (tokens, drawn))
        squares = (tokens.logprobs - tokens.rollout_logprobs).square()[batch.mask]
        descending, order = squares.sort(descending=True)
        rest = descending.flip(0).cumsum(0).flip(0) / torch.arange(len(squares), 0, -1)
        fitting = (rest < threshold).nonzero().flatten()
        number = int(fitting[0]) if len(fitting) else len(squares)
        expected = torch.zeros_like(squares, dtype=torch.bool)
        expected[order[:number]] = True
        assert torch.equal(selected[batch.mask], expected) and not selected[~batch.mask].any()
        masked += number
    assert masked > 140


def policies(batch, shift):
    """The trained policy is the old one but for a shift: covariances of both are equal, and ratios are not 1."""
    tokens, drawn = minibatch(batch)
    old, advantages = (torch.where(batch.mask, x, 0.0) for x in (tokens.logprobs, tokens.advantages))
    logprobs = (old + shift).requires_grad_()
    return (tokens, drawn), policy_tokens(batch, logprobs, old, advantages)


def assert_same(ours, theirs, logprobs, mask):
    torch.testing.assert_close(ours[mask], theirs[mask], rtol=1e-10, atol=1e-12)
    gradients = [torch.autograd.grad(loss[mask].sum(), logprobs)[0] for loss in (ours, theirs)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)


def test_kl_cov_equals_verl():
    for case, batch in enumerate(ragged_batches()):
        options = KlCovOptions(share=(0.0002, 0.1, 0.5)[case % 3], coefficient=(1.0, 0.3)[case % 2])
        before, tokens = policies(batch, 0.1)
        selected = selected_by("kl-cov", options, before)
        number = int(batch.mask.sum())
        assert int(selected.sum()) == max(int(options.share * number), 1)
        settings = types.SimpleNamespace(kl_cov_ratio=options.share, ppo_kl_coef=options.coefficient)
        theirs, _ = verl_loss("kl_cov", batch, tokens, ClipOptions(), policy_loss=settings)
        assert_same(kl_cov(policy_tokens_with(tokens, selected), options).loss, theirs, tokens.logprobs, batch.mask)


def test_clip_cov_equals_verl():
    """Where the share is all tokens, so that both leave out each one that they may."""
    left_out = 0
    for case, batch in enumerate(ragged_batches()):
        least, most = ((0.0, 5.0), (-0.2, 0.3))[case % 2]
        options = ClipCovOptions(0.2, 0.28, share=1.0, least=least, most=most)
        before, tokens = policies(batch, 0.1)
        selected = selected_by("clip-cov", options, before)
        settings = types.SimpleNamespace(clip_cov_ratio=1.0, clip_cov_lb=least, clip_cov_ub=most)
        theirs, metrics = verl_loss("clip_cov", batch, tokens, ClipOptions(0.2, 0.28), policy_loss=settings)
        terms = masked_ppo_clip(policy_tokens_with(tokens, selected), options)
        assert_same(terms.loss, theirs, tokens.logprobs, batch.mask)
        assert float(selected[batch.mask].double().mean()) == pytest.approx(metrics["actor/pg_clipfrac"], abs=1e-7)
        assert torch.equal(terms.clipped[batch.mask], selected[batch.mask])
        some = selected_by("clip-cov", ClipCovOptions(share=0.1, least=least, most=most), before)
        assert int(some.sum()) == min(max(int(0.1 * int(batch.mask.sum())), 1), int(selected.sum()))
        assert not (some & ~selected).any()
        left_out += int(selected.sum())
    assert left_out > 500


def policy_tokens_with(tokens, selected):
    """The same tokens with those selected."""
    return dataclasses.replace(tokens, selected=selected)


def test_selected_tokens_have_no_loss_in_m2po():
    batch = ragged_batches()[7]
    _, tokens = policies(batch, 0.1)
    selected = batch.mask & (torch.arange(len(batch.mask)) % 2 == 0)
    terms, plain = (masked_ppo_clip(policy_tokens_with(tokens, chosen), M2poOptions()) for chosen in (selected, None))
    assert not terms.loss[selected].any() and terms.clipped[selected].all() and selected.any()
    assert torch.equal(terms.loss[~selected], plain.loss[~selected])


def test_random_keys_choose_evenly():
    drawn = torch.rand(100_000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    everything = torch.ones(100_000, dtype=torch.bool)
    keys = random_keys(drawn)
    chosen = lowest_that_fit(keys, drawn, everything, lambda n, _: n <= 1000, alone)
    assert int(chosen.sum()) == 1000 and torch.equal(chosen, drawn <= drawn.sort().values[999])
