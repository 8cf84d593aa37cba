"""Packed attention of one layer, and random queries, keys and values for it."""

from types import SimpleNamespace

import torch
from megatron.core.transformer import TransformerConfig

from megarl.mcore.attention.packed_attention import PackedAttention

D = 8  # channels of a head


def packed_attention(scale=None, backend="sdpa"):
    """The attention of one layer with 4 heads."""
    config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4)
    config.attention_kernel = backend
    groups = SimpleNamespace(tp=None, cp=None)
    return PackedAttention(config, 1, None, "self", softmax_scale=scale, pg_collection=groups)


def random_heads(total, heads, dtype, seed):
    """[total, heads, D] random numbers."""
    generator = torch.Generator().manual_seed(seed)
    return 0.5 * torch.randn(total, heads, D, generator=generator, dtype=torch.float64).to(dtype)
