"""Sums over and broadcasts to the sequences of packed batches: against plain loops, gradients, empty responses."""

import itertools

import pytest
import torch

from megarl.algorithms.packed import broadcast_to_tokens, sums_by_sequence, turn_numbers
from tests.references.ragged import ragged_batches


def response_lists(batch):
    """For each sequence, the indices of its response tokens."""
    borders = [0, *torch.tensor(batch.lengths).cumsum(0).tolist()]
    return [[t for t in range(a, b) if batch.mask[t]] for a, b in itertools.pairwise(borders)]


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
    assert torch.equal(broadcast_to_tokens(values, *where), torch.zeros_like(field))
    assert torch.equal(sums_by_sequence(field, *where), torch.zeros_like(values))


def test_wrong_arguments_are_rejected():
    ones, where = torch.ones(4), (torch.ones(4, dtype=torch.bool), torch.tensor([0, 4]))
    with pytest.raises(ValueError, match="one shape"):
        sums_by_sequence(ones[:1], *where)
    with pytest.raises(ValueError, match=r"values must be \[1\], one a sequence, got \[4\]"):
        broadcast_to_tokens(ones, *where)


def runs(mask: list[bool]) -> list[int]:
    """The turn of each token of one sequence, −1 outside, by a loop."""
    numbers, turn, before = [], -1, False
    for flag in mask:
        turn += flag and not before
        numbers.append(turn if flag else -1)
        before = flag
    return numbers


def test_turns_are_runs_of_response_tokens():
    batches, several = ragged_batches(), 0
    for batch in batches:
        expected = [number for part in batch.mask.split(batch.lengths) for number in runs(part.tolist())]
        assert turn_numbers(batch.mask, batch.cu_seqlens).tolist() == expected
        several += max(expected) > 0
    assert several > 50


def test_turns_end_with_their_sequence():
    mask = torch.tensor([True, True, True, False, True, False])
    assert turn_numbers(mask, torch.tensor([0, 2, 2, 6])).tolist() == [0, 0, 0, -1, 1, -1]
    for cu_seqlens in ([0], [0, 0]):
        assert turn_numbers(mask[:0], torch.tensor(cu_seqlens)).tolist() == []
