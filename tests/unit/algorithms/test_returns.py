"""Returns-to-go, and sums over and broadcasts to sequences: against verl, plain loops and closed forms."""

import itertools
import math
import types

import pytest
import torch

from megarl.algorithms.packed import broadcast_to_tokens, sums_by_sequence
from megarl.algorithms.returns import discounted_sums, discounted_to_go
from tests.references.ragged import ragged_batches
from tests.references.verl_core_algos import load_verl

FACTORS = [1.0, 0.99, 0.5, 0.0]


def response_lists(batch):
    """For each sequence, the indices of its response tokens."""
    borders = [0, *torch.tensor(batch.lengths).cumsum(0).tolist()]
    return [[t for t in range(a, b) if batch.mask[t]] for a, b in itertools.pairwise(borders)]


def test_returns_to_go_equal_verl_and_the_definition():
    reinforce = load_verl().core_algos.compute_reinforce_plus_plus_outcome_advantage
    for case, batch in enumerate(ragged_batches()):
        gamma, rewards = FACTORS[case % 4], batch.normal(10.0 ** (case % 5 - 2))
        to_go = discounted_to_go(rewards, batch.mask, batch.cu_seqlens, gamma)
        expected = torch.zeros_like(rewards)
        for tokens in response_lists(batch):
            for place, token in enumerate(tokens):
                expected[token] = sum(gamma**k * rewards[later] for k, later in enumerate(tokens[place:]))
        torch.testing.assert_close(to_go, expected, rtol=1e-11, atol=1e-10)
        # verl multiplies by the mask, so the rewards outside it do not count there either.
        padded = batch.padded(rewards), batch.padded(batch.mask).double()
        theirs = reinforce(*padded, config=types.SimpleNamespace(gamma=gamma))[1]
        torch.testing.assert_close(to_go, batch.packed(theirs), rtol=1e-11, atol=1e-10)


def test_closed_forms_and_observations_are_skipped():
    terms = torch.tensor([9.0, 1.0, float("nan"), 2.0, 4.0, 9.0, 8.0])
    mask = torch.tensor([False, True, False, True, True, False, True])
    result = discounted_to_go(terms, mask, torch.tensor([0, 6, 7]), 0.5)
    assert result.tolist() == [0.0, 3.0, 0.0, 4.0, 4.0, 0.0, 8.0]
    assert discounted_to_go(terms, mask, torch.tensor([0, 6, 7]), 1.0).tolist() == [0.0, 7.0, 0.0, 6.0, 4.0, 0.0, 8.0]
    assert result.dtype == torch.float32


def test_spread_and_sums_equal_plain_loops():
    for batch in ragged_batches():
        where, number = (batch.mask, batch.cu_seqlens), len(batch.lengths)
        values = torch.randn(number, generator=batch.generator, dtype=torch.float64)
        field = batch.normal().masked_fill(~batch.mask, float("nan"))
        per_token, sums = broadcast_to_tokens(values, *where), sums_by_sequence(field, *where)
        expected = torch.zeros_like(field)
        for sequence, tokens in enumerate(response_lists(batch)):
            expected[tokens] = values[sequence]
            torch.testing.assert_close(sums[sequence], field[tokens].sum(), rtol=1e-12, atol=1e-12)
        assert torch.equal(per_token, expected)
        torch.testing.assert_close(sums_by_sequence(per_token, *where), values * torch.tensor(
            [len(tokens) for tokens in response_lists(batch)]), rtol=1e-12, atol=1e-12)  # fmt: skip


def test_spread_and_sums_have_the_right_gradients():
    mask, borders = torch.tensor([False, True, True, False, True, False]), torch.tensor([0, 4, 4, 6])
    values = torch.randn(3, dtype=torch.float64, requires_grad=True)
    field = torch.randn(6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: broadcast_to_tokens(x, mask, borders), [values])
    assert torch.autograd.gradcheck(lambda x: sums_by_sequence(x, mask, borders), [field])


@pytest.mark.parametrize("lengths", [[], [0], [3], [0, 3, 0]])
def test_no_response_at_all(lengths):
    where = torch.zeros(sum(lengths), dtype=torch.bool), torch.tensor([0, *lengths]).cumsum(0)
    field, values = torch.ones(sum(lengths)), torch.ones(len(lengths))
    assert torch.equal(discounted_to_go(field, *where, 1.0), torch.zeros_like(field))
    assert torch.equal(broadcast_to_tokens(values, *where), torch.zeros_like(field))
    assert torch.equal(sums_by_sequence(field, *where), torch.zeros_like(values))


def test_wrong_arguments_are_rejected():
    ones, where = torch.ones(4), (torch.ones(4, dtype=torch.bool), torch.tensor([0, 4]))
    for factor in (-0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match=r"factor must be in \[0, 1\], got"):
            discounted_to_go(ones, *where, factor)
    with pytest.raises(ValueError, match="one shape"):
        discounted_to_go(ones[:1], *where, 1.0)
    with pytest.raises(ValueError, match="one shape"):
        sums_by_sequence(ones[:1], *where)
    with pytest.raises(ValueError, match=r"values must be \[1\], one a sequence, got \[4\]"):
        broadcast_to_tokens(ones, *where)


@pytest.mark.parametrize("factor", [0.0, 0.9, 1.0])
def test_discounted_sums_are_those_of_the_loop(factor):
    for batch in ragged_batches():
        noise = torch.where(batch.mask, batch.normal(), math.nan)
        sums = [f(noise, batch.mask, batch.cu_seqlens, factor) for f in (discounted_sums, discounted_to_go)]
        torch.testing.assert_close(*sums, rtol=1e-12, atol=1e-12)
        assert not sums[0][~batch.mask].any()
    nothing = torch.zeros(0, dtype=torch.bool)
    assert not len(discounted_sums(torch.zeros(0), nothing, torch.zeros(1, dtype=torch.long), factor))
