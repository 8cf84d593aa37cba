"""How a packed stream is split over context-parallel ranks and into segments, and attention over every split."""

import pytest
import torch

RAGGED = [[1], [2], [1, 1, 1], [3, 5], [7, 1, 33, 2, 5, 4], [64], [1] * 40 + [90], [17, 3, 200, 31, 8]]


@pytest.mark.parametrize("lengths", RAGGED, ids=lambda x: str(x)[:24])
def test_attention_segments_hold_every_token_once(lengths):
    from megarl.mcore.attention.packing import pack_sequences
    from megarl.mcore.attention.segments import FULL

    packing = pack_sequences(torch.tensor(lengths))
    assert packing.padding == 0 and packing.tokens == sum(lengths)
    batches, restore = packing.attention[FULL]
    queries = torch.cat([p.queries.flatten()[p.real_queries] for p in batches])
    assert queries[restore].tolist() == list(range(sum(lengths)))
    assert packing.positions.tolist() == [i for n in lengths for i in range(n)]
    padded = sum(p.keys.numel() for p in batches)
    assert padded <= 1.6 * sum(lengths) + 16 * len(lengths)  # a class of lengths wastes at most half, and a vector


@pytest.mark.parametrize("tensor_ranks, tokens, padding", [(1, 7, 0), (2, 7, 1), (4, 8, 0), (4, 9, 3)])
def test_sequence_parallelism_pads_the_micro_batch_alone(tensor_ranks, tokens, padding):
    from megarl.mcore.attention.packing import pack_sequences

    packing = pack_sequences(torch.tensor([1, tokens - 1]), tensor_ranks=tensor_ranks)
    assert packing.padding == padding and len(packing.token_indices) == tokens + padding
