"""Query groups that tensor-parallel ranks share: what ranks send each other, and Megatron's own way as reference."""

import pytest
import torch
import torch.distributed as dist

from megarl.mcore.model.projections import HeadLayout
from megarl.mcore.model.shared_groups import columns_between, columns_sent
from tests.helpers.models.tiny_models import build
from tests.helpers.tiers import by_default
from tests.helpers.worlds import run_world


@pytest.mark.parametrize("heads", [HeadLayout(1, 8, 4), HeadLayout(2, 4, 6), HeadLayout(2, 8, 2)])
def test_each_rank_gets_its_queries_the_key_and_the_value(heads):
    for ranks in (1, 2, 4):
        rows, own = (heads.queries + 2) * heads.channels // ranks, heads.queries // ranks * heads.channels
        whole, sent = torch.arange(ranks * rows), 0
        for receiver in range(ranks):
            got = torch.full((own + 2 * heads.channels,), -1)
            for sender in range(ranks):
                for given, received in columns_between(heads, ranks, sender, receiver):
                    got[received] = whole[sender * rows : (sender + 1) * rows][given]
                    sent += given.stop - given.start if sender != receiver else 0
            kv = whole[heads.queries * heads.channels :]
            assert torch.equal(got, torch.cat([whole[receiver * own : (receiver + 1) * own], kv]))
        assert columns_sent(heads, ranks) == sent / ranks


def heads_of_rank(rank, flags: str) -> list[tuple]:
    """(queries, keys, values, gradients of hidden states and of weights before them) of megarl's way and Megatron's."""
    from megatron.core.transformer.attention import SelfAttention

    model, args, _ = build(flags)
    attention, found = model.decoder.layers[0].self_attention, []
    numbers = torch.Generator().manual_seed(0)
    tokens = 11 // (dist.get_world_size() if args.sequence_parallel else 1)
    hidden, grads = torch.randn(tokens, 1, 64, generator=numbers), None
    for way in (type(attention).get_query_key_value_tensors, SelfAttention.get_query_key_value_tensors):
        hidden = hidden.detach().requires_grad_()
        heads = way(attention, hidden)
        drawn = torch.Generator().manual_seed(rank)
        grads = grads or [torch.randn(x.shape, generator=drawn) for x in heads]
        wanted = [p for name, p in attention.named_parameters() if "linear_qkv" in name or "layernorm" in name]
        found.append((*(x.detach() for x in heads), *torch.autograd.grad(heads, [hidden, *wanted], grads)))
    return found


CASES = [
    (2, "--num-query-groups 1"), (4, "--num-query-groups 2 --add-qkv-bias"),
    (4, "--num-query-groups 1 --qk-layernorm --sequence-parallel"),
]  # fmt: skip


@pytest.mark.parametrize("ranks, flags", by_default(CASES, CASES[:1]))
def test_heads_are_megatrons_to_the_bit_and_gradients_to_rounding(ranks, flags):
    for ours, megatrons in run_world(heads_of_rank, ranks, f"--tensor-model-parallel-size {ranks} {flags}"):
        for i, (one, other) in enumerate(zip(ours, megatrons, strict=True)):
            assert one.shape == other.shape and one.any()
            assert torch.equal(one, other) if i < 3 else torch.allclose(one, other, rtol=1e-5, atol=1e-5), i
