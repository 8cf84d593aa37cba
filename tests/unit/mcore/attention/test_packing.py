"""How a packed stream is split over context-parallel ranks and into segments, and attention over every split."""

import itertools

import pytest
import torch
import torch.distributed as dist

from tests.helpers.attention_inputs import packed_attention, random_heads
from tests.helpers.exactness import largest_gap_allowed
from tests.helpers.tiers import long
from tests.helpers.worlds import run_world

RAGGED = [[1], [2], [1, 1, 1], [3, 5], [7, 1, 33, 2, 5, 4], [64], [1] * 40 + [90], [17, 3, 200, 31, 8]]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_ranks_hold_the_stream_in_equal_shares(ranks):
    from megarl.mcore.parallel.context_parallel import chunks_of, stream_order

    tokens = 2 * ranks * 5
    held = [[t for a, b in chunks_of(r, ranks, tokens) for t in range(a, b)] for r in range(ranks)]
    assert {len(share) for share in held} == {tokens // ranks}
    gathered = torch.tensor(sum(held, []))
    assert gathered[stream_order(ranks, tokens)].tolist() == list(range(tokens))
    work = [sum(share) for share in held]  # keys that the queries of one long sequence see
    assert max(work) == min(work)


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


def over_context_ranks(rank, lengths, dtype):
    """Attention's result and the gradients of query, key and value, gathered from all ranks; and those of one rank."""
    from megarl.mcore.attention.packing import pack_sequences
    from megarl.mcore.parallel.context_parallel import gather_result

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


def test_keys_on_other_ranks_get_gradients():
    """The gradient of an early key comes from queries that other ranks hold."""

    def gradient(rank):
        from megarl.mcore.attention.packing import pack_sequences

        packing = pack_sequences(torch.tensor([8]), dist.group.WORLD)
        query, key, value = (random_heads(4, h, torch.float64, 7 + h) for h in (4, 2, 2))
        value.requires_grad_()
        out = packed_attention()(query, key, value, None, packed_seq_params=packing)
        (out * (rank == 0)).sum().backward()  # rank 0 holds tokens 0, 1, 6, 7; rank 1 holds 2 … 5
        return value.grad.abs().sum((1, 2)).tolist()

    first, second = run_world(gradient, 2)
    assert all(x > 0 for x in first + second)


def test_weights_are_named_by_layer_and_drawn_as_the_config_says():
    def drawn(rank):
        from tests.helpers.tiny_models import build

        found = {}
        for seed, flags in itertools.product((1, 2), ("", "--num-experts 4 --moe-router-topk 2")):
            model, *_ = build(f"--num-layers 4 --seed {seed} {flags}")
            found[seed, flags] = {name: p.detach().clone() for name, p in model.named_parameters()}
        return found

    (models,) = run_world(drawn, 1)
    dense, other, experts = models[1, ""], models[2, ""], models[1, "--num-experts 4 --moe-router-topk 2"]
    first, second = (dense[f"decoder.layers.{i}.self_attention.linear_qkv.weight"] for i in (0, 1))
    assert not torch.equal(first, second)
    assert not torch.equal(first, other["decoder.layers.0.self_attention.linear_qkv.weight"])
    assert torch.equal(first, experts["decoder.layers.0.self_attention.linear_qkv.weight"])
    matrices = [experts[f"decoder.layers.0.mlp.experts.local_experts.{i}.linear_fc1.weight"] for i in range(4)]
    assert len({float(m.sum()) for m in matrices}) == 4
    assert float(first.std()) == pytest.approx(0.1, rel=0.05)
    deep = torch.cat([dense[f"decoder.layers.{i}.mlp.linear_fc2.weight"].flatten() for i in range(4)])
    assert float(deep.std()) == pytest.approx(0.1 / (2 * 4) ** 0.5, rel=0.05)
    assert not any(p.isnan().any() for p in experts.values())
