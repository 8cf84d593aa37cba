"""Attention gives a token the same bits in training and in rollout, whatever batch it is in (docs/exactness.md)."""

import importlib

import pytest
import torch

from megarl.mcore.kernels import native as kernels
from tests.helpers.exactness import largest_gap_of_operators

H, G, D, BLOCK = 4, 2, 16, 16


def cached(key, value, cu_seqlens):
    """Keys and values of packed sequences in a block cache: (the cache, blocks of each sequence)."""
    lengths = cu_seqlens.diff().tolist()
    blocks = [-(-length // BLOCK) for length in lengths]
    table = torch.zeros(len(lengths), max(blocks), dtype=torch.int64)  # arbitrary after a sequence's last block
    cache = torch.full((sum(blocks), BLOCK, G, 2, D), 100.0)  # what the memory held before
    both = torch.stack([key, value], dim=2)
    first = 0
    for row, (start, length, count) in enumerate(zip(cu_seqlens.tolist(), lengths, blocks, strict=False)):
        table[row, :count] = torch.arange(first, first + count)
        cache[first : first + count].view(-1, G, 2, D)[:length] = both[start : start + length]
        first += count
    return cache, table


@pytest.mark.parametrize("name", ["backends.sdpa", "native_attention"])
def test_prefill_and_decode_are_the_packed_attention(name):
    if name == "native_attention" and not kernels.is_built():
        pytest.skip("no compiled kernels: no C++ compiler, or CUDA")
    backend = importlib.import_module(f"megarl.mcore.attention.{name}")
    from megarl.mcore.attention.cache_attention import StepRequests
    from megarl.mcore.attention.packing import pack_sequences
    from megarl.mcore.attention.segments import FULL

    generator = torch.Generator().manual_seed(3)
    lengths = torch.cat([torch.tensor([1, 2, 3, 4, 5, 31, 32, 33, 34, 35, 47, 64, 67]),
                         torch.randint(1, 80, (7,), generator=generator)])  # fmt: skip
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    query, key, value = (torch.randn(int(lengths.sum()), n, D, generator=generator) for n in (H, G, G))
    packed = backend.packed_attention(query, key, value, pack_sequences(lengths).attention[FULL], None)

    cache, table = cached(key, value, cu_seqlens)
    for rows in ([0], [3, 4], [9], [5, 7, 12], list(range(len(lengths)))):
        count = lengths[rows]
        tokens = torch.cat([torch.arange(int(cu_seqlens[r]), int(cu_seqlens[r + 1])) for r in rows])
        last = cu_seqlens[1:][rows] - 1
        for places, new in ((tokens, count), (last, torch.ones_like(count))):
            reads = backend.plan_cache_reads(StepRequests(new, count, table[rows], len(places), cache))
            out = backend.PagedAttention()(query[places].unflatten(1, (G, -1)), cache, reads)
            allowed = 0.0 if name == "native_attention" else largest_gap_of_operators()
            assert (out.view(-1, H, D) - packed[places]).abs().max() <= allowed
