"""REAL: its gradient is that of the classification loss of a plain loop, and does not depend on ranks."""

import pytest
import torch

from megarl.algorithms.aggregation import aggregate, local_counts
from megarl.algorithms.policy_loss import MinibatchResponses
from megarl.algorithms.policy_losses.real import RealOptions, compare, real
from tests.references.ragged import ragged_steps
from tests.references.verl_policy_losses import policy_tokens


def cases():
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
        columns = log_ratios[its_tokens], advantages[its_tokens], step.batch.mask[its_tokens], borders
        yield its_tokens, MinibatchResponses(*columns, step.groups[its], int(step.groups.max()) + 1, lambda x: x)


def test_the_gradient_is_that_of_the_classification():
    compared = 0
    for step, old, start, advantages, tau in cases():
        batch, groups = step.batch, int(step.groups.max()) + 1
        inputs = MinibatchResponses(
            start - old, advantages, batch.mask, batch.cu_seqlens, step.groups, groups, lambda x: x
        )
        logprobs = start.clone().requires_grad_()
        found = compare(inputs, RealOptions(tau))
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
    for case, (step, old, logprobs, advantages, tau) in enumerate(cases()):
        count, generator = len(step.batch.lengths), torch.Generator().manual_seed(case)
        is_on_first = (torch.rand(count, generator=generator) < (0.0, 0.5, 1.0)[case % 3]).tolist()
        (both, whole), _ = of_ranks(step, logprobs - old, advantages, [True] * count)
        expected, ranks, tables = compare(whole, RealOptions(tau)), [], []
        for _, part in of_ranks(step, logprobs - old, advantages, is_on_first):
            compare(part._replace(total=lambda x: tables.append(x) or x), RealOptions(tau))
        for at, part in of_ranks(step, logprobs - old, advantages, is_on_first):
            ranks.append((at, compare(part._replace(total=lambda _: sum(tables)), RealOptions(tau))))
        found = torch.zeros_like(expected)
        for at, its in ranks:
            found[at] = its
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("scale", [1e4, 1e30])
def test_extreme_ratios_compare_finitely(scale):
    log_ratios, mask = torch.tensor([scale, -scale, scale, -scale]), torch.ones(4, dtype=torch.bool)
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0])
    where = mask, torch.arange(5), torch.zeros(4, dtype=torch.int64), 1
    found = compare(MinibatchResponses(log_ratios, advantages, *where, lambda x: x), RealOptions(0.01))
    assert found.isfinite().all() and found.tolist() == pytest.approx([0.0, 400.0, -400.0, 0.0])
