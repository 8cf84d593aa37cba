"""Rotation by CUDA's kernels, run by Triton's interpreter: decode steps have the bits of single operators."""

import pytest
import torch

from megarl.mcore.attention.rotary_embeddings import Rotation
from megarl.mcore.kernels.cuda.rotate_heads import rotate_and_store, rotate_heads
from tests.helpers.models import reference_kernels


def test_no_tokens():
    query, key = rotate_heads(torch.empty(0, 4, 8), torch.empty(0, 2, 8), *torch.empty(2, 0, 1, 8), False)
    assert query.shape == (0, 4, 8) and key.shape == (0, 2, 8)


# -- decode steps --------------------------------------------------------------------------------------------------

DECODES = {  # G, R, D, rotated channels
    "all channels": (2, 3, 16, 16),
    "some channels": (1, 4, 24, 8),
    "one query head": (2, 1, 16, 16),
    "not rotated": (2, 2, 16, None),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # the interpreter cuts numbers to bf16
@pytest.mark.parametrize("case", DECODES.values(), ids=DECODES)
def test_it_has_the_bits_of_single_operators(case, dtype):
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
