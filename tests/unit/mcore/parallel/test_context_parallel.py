"""A packed stream over context-parallel ranks: equal shares, attention as on one rank, gradients of keys elsewhere."""

import pytest
import torch
import torch.distributed as dist

from megarl.mcore.attention.packing import pack_sequences
from megarl.mcore.parallel.context_parallel import chunks_of, gather_result, stream_order
from tests.helpers.exactness import largest_gap_allowed
from tests.helpers.models.attention_inputs import packed_attention, random_heads
from tests.helpers.tiers import long
from tests.helpers.worlds import run_world

RAGGED = [[1], [2], [1, 1, 1], [3, 5], [7, 1, 33, 2, 5, 4], [64], [1] * 40 + [90], [17, 3, 200, 31, 8]]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_ranks_hold_the_stream_in_equal_shares(ranks):
    tokens = 2 * ranks * 5
    held = [[t for a, b in chunks_of(r, ranks, tokens) for t in range(a, b)] for r in range(ranks)]
    assert {len(share) for share in held} == {tokens // ranks}
    gathered = torch.tensor(sum(held, []))
    assert gathered[stream_order(ranks, tokens)].tolist() == list(range(tokens))
    work = [sum(share) for share in held]  # keys that the queries of one long sequence see
    assert max(work) == min(work)


def over_context_ranks(rank, lengths, dtype):
    """Attention's result and the gradients of query, key and value, gathered from all ranks; and those of one rank."""
    lengths, group = torch.tensor(lengths), dist.group.WORLD
    alone, cut = pack_sequences(lengths), pack_sequences(lengths, group)
    total = int(lengths.sum())
    inputs = [random_heads(total, h, dtype, i).requires_grad_() for i, h in enumerate((4, 2, 2))]
    weight = random_heads(total, 4, dtype, 3).flatten(1)

    whole = packed_attention()(*inputs, None, packed_seq_params=alone)
    expected = torch.autograd.grad((whole * weight).sum(), inputs)

    padded = [torch.cat([x, x.new_zeros(cut.padding, *x.shape[1:])]) for x in inputs]
    local = packed_attention()(*(x[cut.token_indices] for x in padded), None, packed_seq_params=cut)
    result = gather_result(local, group)[cut.order][:total]
    gradients = torch.autograd.grad((result * weight).sum(), inputs)
    for gradient in gradients:
        dist.all_reduce(gradient)  # each rank holds the part of its tokens
    pairs = zip(gradients, expected, strict=True)
    apart = max(float((g - e).abs().max() / e.abs().max().clamp(min=1)) for g, e in pairs)
    return float((result - whole).abs().max()), apart, cut.padding


@pytest.mark.parametrize("ranks", [2, 3, long(4)])
@pytest.mark.parametrize("dtype", [torch.float32, long(torch.float64)], ids=str)
def test_context_ranks_attend_as_one(ranks, dtype):
    edge = [[1], [2], [2 * ranks - 1], [2 * ranks + 1], [1, 2, 2 * ranks - 1, 2 * ranks + 1, 23]]

    def all_of(rank):
        return [over_context_ranks(rank, lengths, dtype) for lengths in edge + RAGGED]

    for found in run_world(all_of, ranks):
        for difference, apart, padding in found:
            assert difference <= (largest_gap_allowed() if dtype == torch.float32 else 1e-12)
            assert apart <= (1e-5 if dtype == torch.float32 else 1e-12)
            assert padding < 4 * ranks + 2 * ranks
