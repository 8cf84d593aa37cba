"""Core attention over packed sequences for the layer spec, through PyTorch's SDPA.

megatron-core's own core attention does not support packed sequences and builds the full score matrix. This one runs on
CPU and CUDA, with one SDPA call per segment batch. `paged_attention` has the attention of rollout.
Shapes: T tokens of N sequences, H query heads, G key/value groups, D channels per head.
"""

import torch
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from megarl.mcore.attention.segments import SegmentBatch
from megarl.mcore.parallel.context_parallel import gather_for_attention


def gather_rows(tokens: Tensor, indices: Tensor) -> Tensor:
    """[T, heads, …] and indices [n, L] -> [n, heads, L, …].

    A token may be a key of several segments. On CUDA the backward of `index_select` adds their gradients in no fixed
    order; that of indexing is deterministic.
    """
    flat = indices.flatten()
    rows = tokens[flat] if tokens.is_cuda else tokens.index_select(0, flat)
    return rows.unflatten(0, indices.shape).transpose(1, 2)


def attend_segments(query: Tensor, key: Tensor, value: Tensor, segments: SegmentBatch, scale: float | None) -> Tensor:
    """Returns outputs [m, H, D] of the segments' real queries, one segment after another.

    Takes queries [T, H, D] of all tokens, and the segments' keys and values [n, G, K, D].
    """
    query, is_causal = gather_rows(query, segments.queries), segments.mask is None
    out = sdpa(query, key, value, segments.mask, is_causal=is_causal, scale=scale, enable_gqa=True)
    return out.transpose(1, 2).flatten(0, 1)[segments.real]


class PackedAttention(MegatronModule):
    """Causal grouped-query attention over packed sequences [T, H, D], with any context parallelism."""

    def __init__(self, config, layer_number, attn_mask_type, attention_type, pg_collection, softmax_scale=None, **_):
        super().__init__(config=config)
        self.softmax_scale = softmax_scale
        self.tp_group = pg_collection.tp  # else checkpointing reads the group from Megatron's global state

    def forward(self, query, key, value, attention_mask, attn_mask_type=None, packed_seq_params=None, **_):
        """query [T, H, D], key, value [T, G, D] of this rank -> [T, H·D]; `packed_seq_params` is a `PackedLayout`."""
        packing = packed_seq_params
        if packing.order is not None:
            key_value = gather_for_attention(torch.cat([key, value], dim=1), packing.order, packing.cp_group)
            key, value = key_value.chunk(2, dim=1)

        def attend(segments: SegmentBatch) -> Tensor:
            keys, values = gather_rows(key, segments.keys), gather_rows(value, segments.keys)
            return attend_segments(query, keys, values, segments, self.softmax_scale)

        results = [attend(segments) for segments in packing.pieces]
        return torch.cat(results)[packing.restore].flatten(1)
