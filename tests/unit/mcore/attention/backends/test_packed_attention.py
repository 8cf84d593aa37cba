"""Packed attention against a softmax written out for each sequence alone."""

import pytest
import torch

from megarl.mcore.attention.packing import pack_sequences
from tests.helpers.models.attention_inputs import assert_as_each_sequence_alone, packed_attention, random_heads

LENGTHS = [[1], [7], [1, 1, 1], [5, 1, 9, 2], [3, 12, 1, 12], [33, 2]]
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("heads, groups", [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_packed_attention_equals_each_sequence_alone(lengths, heads, groups, dtype):
    scale = 0.7 if dtype is torch.float64 else None
    assert_as_each_sequence_alone(lengths, heads, groups, dtype, TOLERANCE[dtype], scale)


def test_a_sequence_does_not_see_its_neighbours():
    inputs = [random_heads(9, h, torch.float32, i) for i, h in enumerate((4, 2, 2))]
    params = pack_sequences(torch.tensor([4, 5]))
    first = packed_attention()(*inputs, None, packed_seq_params=params)
    for x in inputs:
        x[4:] = float("nan")
    second = packed_attention()(*inputs, None, packed_seq_params=params)
    assert torch.equal(first[:4], second[:4])
