"""Packed attention against a softmax written out for each sequence alone."""

import pytest
import torch

from megarl.mcore.attention.packing import pack_sequences
from tests.helpers.models.attention_inputs import D, exact_attention, packed_attention, random_heads

LENGTHS = [[1], [7], [1, 1, 1], [5, 1, 9, 2], [3, 12, 1, 12], [33, 2]]
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("heads, groups", [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_packed_attention_equals_each_sequence_alone(lengths, heads, groups, dtype):
    total = sum(lengths)
    inputs = [random_heads(total, h, dtype, i).requires_grad_() for i, h in enumerate((heads, groups, groups))]
    weight, scale = random_heads(total, heads, dtype, 3), 0.7 if dtype is torch.float64 else None
    packed = packed_attention(scale=scale)(*inputs, None, packed_seq_params=pack_sequences(torch.tensor(lengths)))
    assert packed.shape == (total, heads * D) and packed.dtype == dtype
    gradients = torch.autograd.grad((packed.view_as(weight) * weight).sum(), inputs)

    exact = [x.detach().double().requires_grad_() for x in inputs]
    parts = zip(*(x.split(lengths) for x in exact), strict=True)
    expected = torch.cat([exact_attention(*part, scale=scale) for part in parts])
    wanted = torch.autograd.grad((expected * weight.double()).sum(), exact)
    assert (packed.view_as(expected) - expected).abs().max() <= TOLERANCE[dtype]
    for gradient, want in zip(gradients, wanted, strict=True):
        assert (gradient - want).abs().max() <= TOLERANCE[dtype] * max(1.0, float(want.abs().max()))


def test_a_sequence_does_not_see_its_neighbours():
    inputs = [random_heads(9, h, torch.float32, i) for i, h in enumerate((4, 2, 2))]
    params = pack_sequences(torch.tensor([4, 5]))
    first = packed_attention()(*inputs, None, packed_seq_params=params)
    for x in inputs:
        x[4:] = float("nan")
    second = packed_attention()(*inputs, None, packed_seq_params=params)
    assert torch.equal(first[:4], second[:4])
