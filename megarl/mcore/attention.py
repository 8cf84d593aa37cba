"""Attention for the layer spec: packed sequences in training, a paged cache in rollout, through PyTorch's SDPA.

megatron-core's own core attention knows no packed sequences and builds the full score matrix; its rollout kernels
need flash-attn. Both modules here run on CPU and CUDA alike and are chosen by the layer spec, not by patching.
Shapes: T tokens of N sequences, H query heads, G key/value groups, D channels per head.
"""

import torch
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from megarl.mcore.context_parallel import gather_for_attention
from megarl.mcore.packing import LEAST_ROWS, Pieces, key_width


def token_grid(cu_seqlens: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Row (sequence) and column (position in it) of each of `total` packed tokens, both [T] int64."""
    lengths = cu_seqlens.diff()
    rows = torch.repeat_interleave(torch.arange(len(lengths), device=cu_seqlens.device), lengths, output_size=total)
    return rows, torch.arange(total, device=cu_seqlens.device) - cu_seqlens[rows]


def pad_tokens(packed: Tensor, rows: Tensor, columns: Tensor, count: int, width: int) -> Tensor:
    """[T, heads, D] -> [count, heads, width, D], zeros behind the end of each sequence."""
    padded = packed.new_zeros(count, width, *packed.shape[1:])
    padded[rows, columns] = packed
    return padded.transpose(1, 2)


def _take(tokens: Tensor, places: Tensor) -> Tensor:
    """[T, heads, D] and places [n, L] -> [n, heads, L, D]."""
    return tokens.index_select(0, places.flatten()).unflatten(0, places.shape).transpose(1, 2)


class PackedAttention(MegatronModule):
    """Causal attention over packed sequences [T, H, D] with grouped queries, in any cut over context-parallel ranks."""

    def __init__(self, config, layer_number, attn_mask_type, attention_type, pg_collection, softmax_scale=None, **_):
        super().__init__(config=config)
        self.softmax_scale = softmax_scale
        self.tp_group = pg_collection.tp  # else a checkpoint asks Megatron's process-wide state for it

    def forward(self, query, key, value, attention_mask, attn_mask_type=None, packed_seq_params=None, **_):
        """query [T, H, D], key and value [T, G, D] of this rank -> [T, H·D]; `packed_seq_params` is a `Packing`."""
        packing = packed_seq_params
        if packing.order is not None:
            both = gather_for_attention(torch.cat([key, value], dim=1), packing.order, packing.cp_group)
            key, value = both.chunk(2, dim=1)
        results = [self._attend(query, key, value, pieces) for pieces in packing.pieces]
        return torch.cat(results)[packing.restore]

    def _attend(self, query, key, value, pieces: Pieces):
        """Results of a class of pieces [m, H·D], its real queries behind each other."""
        query = _take(query, pieces.queries)
        key, value = _take(key, pieces.keys), _take(value, pieces.keys)
        out = sdpa(
            query, key, value, pieces.mask, is_causal=pieces.mask is None, scale=self.softmax_scale, enable_gqa=True
        )
        return out.transpose(1, 2).flatten(0, 1)[pieces.real].flatten(1)


def paged_attention(query, key_cache, value_cache, cu_query, lengths, blocks, widest_query, longest_key, scale=None):
    """Attention of new tokens over a block cache, prefill and decode mixed.

    query [T, H, D] packed by cu_query [N+1] (tokens behind cu_query[N] are padding and come out as zeros); caches
    [blocks, block, G, D]; lengths [N] keys of each request, new tokens included; blocks [N, B] its cache blocks.
    Returns [T, H, D]. Query i of a request with q new tokens and k keys sees keys 0 … k − q + i.
    """
    count, block = lengths.shape[0], key_cache.shape[1]
    longest_key = key_width(longest_key, query.device)
    used = min(-(-longest_key // block), blocks.shape[1])
    longest_key = min(longest_key, used * block)
    pages = blocks[:count, :used].long().clamp_min(0)
    cu_query, lengths = cu_query[: count + 1].long(), lengths.long()
    # Rows behind a request's end are whatever the memory held: masked out, but 0 · NaN would still be NaN.
    unused = (torch.arange(longest_key, device=query.device) >= lengths.unsqueeze(1))[:, None, :, None]
    key, value = (
        c[pages].flatten(1, 2)[:, :longest_key].transpose(1, 2).masked_fill(unused, 0.0)
        for c in (key_cache, value_cache)
    )
    total = int(cu_query[-1])
    rows, columns = token_grid(cu_query, total)
    widest_query = -(-widest_query // LEAST_ROWS) * LEAST_ROWS  # the kernel's last block of rows is not a small one
    padded = pad_tokens(query[:total], rows, columns, count, widest_query)
    first_hidden = (lengths - cu_query.diff()).unsqueeze(1) + 1 + torch.arange(widest_query, device=query.device)
    # A padded query row sees key 0 alone, so that its softmax is finite; nobody reads the result.
    seen = torch.arange(longest_key, device=query.device) < first_hidden.clamp_min(1).unsqueeze(2)
    out = sdpa(padded, key, value, attn_mask=seen.unsqueeze(1), scale=scale, enable_gqa=True)
    result = torch.zeros_like(query)
    result[:total] = out.transpose(1, 2)[rows, columns]
    return result


class PagedSelfAttention(SelfAttention):
    """Megatron's self-attention whose rollout kernel is `paged_attention` instead of flash-attn's."""

    def flash_decode_and_prefill(
        self, q, k, v, max_seqlen_q, max_seqlen_k, cu_seqlens_q, cu_seqlens_k, seqlens_k, block_table, *_, **__
    ):
        """q [T, 1, H, D]; k, v: the layer's cache [blocks, block, G, D] -> [T, 1, H, D]. Called by `forward`."""
        out = paged_attention(
            q.squeeze(1), k, v, cu_seqlens_q, seqlens_k, block_table, int(max_seqlen_q), int(max_seqlen_k)
        )
        return out.unsqueeze(1)
