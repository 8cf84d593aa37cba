"""Kernels for pairs of tokens and experts, by Triton's interpreter: the bits of PyTorch's operators."""

import pytest
import torch

from megarl.mcore.kernels.cuda import expert_pairs
from tests.helpers.models import reference_kernels
from tests.helpers.tiers import long


@pytest.mark.parametrize("tokens, experts, each", [(1, 8, 2), long((70, 24, 3)), (40, 5, 1), long((20, 128, 8))])
def test_pairs_lie_in_the_order_of_experts_and_their_sums_have_the_same_bits(tokens, experts, each, monkeypatch):
    monkeypatch.setattr(expert_pairs, "TOKEN_TILE", 32)  # so that some tokens, and channels, are in other tiles
    monkeypatch.setattr(expert_pairs, "CHANNEL_TILE", 64)
    generator = torch.Generator().manual_seed(tokens)
    chosen = torch.rand(tokens, experts, generator=generator).topk(each).indices
    routing_map = torch.zeros(tokens, experts, dtype=torch.bool).scatter_(1, chosen, True)
    counts = routing_map.sum(0)
    found, expected = (module.expert_pairs(routing_map, counts, each) for module in (expert_pairs, reference_kernels))
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other) and one.dtype is torch.int64
    values = torch.randn(tokens * each, 70, generator=generator)
    for dtype in (torch.float32, torch.float16):  # the interpreter cuts numbers to bf16
        sums = [module.sum_pairs(values.to(dtype), found[2], tokens) for module in (expert_pairs, reference_kernels)]
        assert torch.equal(*sums) and sums[0].dtype is dtype
