"""Attention over packed sequences for the layer spec, through PyTorch's SDPA.

megatron-core's own core attention knows no packed sequences and builds the full score matrix. This one runs on CPU and
CUDA alike and is chosen by the layer spec, not by patching. `paged` and `decode` have the rollout's.
Shapes: T tokens of N sequences, H query heads, G key/value groups, D channels per head.
"""

import torch
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from megarl.mcore.attention.segments import SegmentBatch
from megarl.mcore.parallel.context_parallel import gather_for_attention


def gather_rows(tokens: Tensor, places: Tensor) -> Tensor:
    """[T, heads, …] and places [n, L] -> [n, heads, L, …].

    A token may be several pieces' key. On CUDA backward of a selection adds their gradients in no fixed order, that of
    an index in one that is.
    """
    flat = places.flatten()
    rows = tokens[flat] if tokens.is_cuda else tokens.index_select(0, flat)
    return rows.unflatten(0, places.shape).transpose(1, 2)


def attend_segments(query: Tensor, key: Tensor, value: Tensor, pieces: SegmentBatch, scale: float | None) -> Tensor:
    """Results [m, H, D] of the pieces' real queries behind each other; query [T, H, D], the pieces' own keys and values
    [n, G, K, D]."""
    query, is_causal = gather_rows(query, pieces.queries), pieces.mask is None
    out = sdpa(query, key, value, pieces.mask, is_causal=is_causal, scale=scale, enable_gqa=True)
    return out.transpose(1, 2).flatten(0, 1)[pieces.real]


class PackedAttention(MegatronModule):
    """Causal attention over packed sequences [T, H, D] with grouped queries, in any cut over context-parallel ranks."""

    def __init__(self, config, layer_number, attn_mask_type, attention_type, pg_collection, softmax_scale=None, **_):
        super().__init__(config=config)
        self.softmax_scale = softmax_scale
        self.tp_group = pg_collection.tp  # else a checkpoint asks Megatron's process-wide state for it

    def forward(self, query, key, value, attention_mask, attn_mask_type=None, packed_seq_params=None, **_):
        """query [T, H, D], key and value [T, G, D] of this rank -> [T, H·D]; `packed_seq_params` is a `PackedLayout`."""
        packing = packed_seq_params
        if packing.order is not None:
            both = gather_for_attention(torch.cat([key, value], dim=1), packing.order, packing.cp_group)
            key, value = both.chunk(2, dim=1)
        results = [
            attend_segments(
                query, gather_rows(key, pieces.keys), gather_rows(value, pieces.keys), pieces, self.softmax_scale
            )
            for pieces in packing.pieces
        ]
        return torch.cat(results)[packing.restore].flatten(1)
