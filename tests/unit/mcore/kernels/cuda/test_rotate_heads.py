"""Rotation by CUDA's kernels, run by Triton's interpreter, has the bits of single operators."""

import pytest
import torch

from megarl.mcore.attention.rotary_embeddings import Rotation
from megarl.mcore.kernels.cuda.rotate_heads import begin_rows, join_heads, rotate_and_store, rotate_heads, split_heads
from tests.helpers.models import reference_kernels


def test_no_tokens():
    query, key = rotate_heads(torch.empty(0, 4, 8), torch.empty(0, 2, 8), *torch.empty(2, 0, 1, 8), False)
    assert query.shape == (0, 4, 8) and key.shape == (0, 2, 8)
    assert join_heads(query, key, key, None, None).shape == (0, 2, 4, 8)


SHAPES = {  # G, R, D, rotated channels
    "all channels": (2, 3, 16, 16),
    "some channels": (1, 4, 24, 8),
    "one query head": (2, 1, 16, 16),
    "not rotated": (2, 2, 16, None),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # the interpreter cuts numbers to bf16
@pytest.mark.parametrize("case", SHAPES.values(), ids=SHAPES)
def test_groups_have_the_bits_of_single_operators_and_their_gradients_are_exact(case, dtype):
    groups, queries, channels, rotated = case
    product = torch.randn(5, groups * (queries + 2) * channels + 3).to(dtype)[:, 3:]
    heads = product.unflatten(1, (groups, queries + 2, channels))
    tables = None, None
    if rotated:
        tables = Rotation.of(torch.randn(5, 1, rotated // 2).repeat(1, 1, 2), dtype)
    found, expected = split_heads(heads, *tables), reference_kernels.split_heads(heads, *tables)
    assert all(map(torch.equal, found, expected))
    grads = [torch.randn(5, heads_of, channels).to(dtype) for heads_of in (groups * queries, groups, 2 * groups)]
    grads[2] = grads[2][:, groups:]  # of other strides
    joined = join_heads(*grads, *tables)
    assert joined.dtype is dtype and torch.equal(joined, reference_kernels.join_heads(*grads, *tables))
    exact = torch.randn(5, groups, queries + 2, channels, dtype=torch.float64, requires_grad=True)
    wide = [each if each is None else each.double() for each in tables]
    outputs = [*reference_kernels.split_heads(exact, *wide), exact[:, :, -1]]
    (wanted,) = torch.autograd.grad(outputs, exact, [grad.double() for grad in grads])
    assert torch.allclose(joined.double(), wanted, rtol=0, atol=1e-5 if dtype is torch.float32 else 1e-2)


def test_a_step_begins_with_its_places_in_the_cache():
    sent, size = torch.tensor([5, 9, 7, 0], dtype=torch.int32), 4
    positions = torch.tensor([0, 7, 12, -1], dtype=torch.int32)  # the last row is padding
    blocks = torch.tensor([[3, 2, 1, 0], [8, 9, 0, 0], [4, 5, 6, 7], [11, 11, 11, 11]], dtype=torch.int32)
    made = [torch.full((4,), -5, dtype=kind) for kind in (torch.int64, torch.int64, torch.int32, torch.int64)]
    begin_rows(*made, sent, positions, blocks, size)
    assert [each.tolist() for each in made] == [[5, 9, 7, 0], [0, 7, 12, 0], [1, 8, 13, 0], [12, 39, 28, 44]]
    expected = [torch.empty_like(each) for each in made]
    reference_kernels.begin_rows(*expected, sent, positions, blocks, size)
    assert all(map(torch.equal, made, expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("case", SHAPES.values(), ids=SHAPES)
def test_a_decode_step_has_the_bits_of_single_operators(case, dtype):
    groups, queries, channels, rotated = case
    heads = torch.randn(5, groups, queries + 2, channels).to(dtype)
    tables = None, None
    if rotated:
        tables = Rotation.of(torch.randn(9, 1, 1, rotated), dtype).at(torch.tensor([3, 8, 0, 5, 5]))
    slots, cache = torch.tensor([7, 0, 3, 11, 2]), torch.randn(12, groups, 2, channels).to(dtype)
    expected = heads.clone(), cache.clone()
    reference_kernels.rotate_and_store(expected[0], *tables, expected[1], slots)
    rotate_and_store(heads, *tables, cache, slots)
    assert torch.equal(cache, expected[1])
    assert torch.equal(heads[:, :, :queries], expected[0][:, :, :queries])
    assert rotated is None or not torch.equal(cache[7, :, 0], heads[0, :, queries])  # the key went there, rotated
