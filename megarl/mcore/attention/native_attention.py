"""Attention by the compiled kernels (`kernels.native`): no copies of keys and values, in training and in rollout.

`--attention-backend sdpa` uses it for models in fp32 on a CPU without a window, softcap, sinks or latents. A query's
result depends on its query and its keys alone, and is the same in a decode step, a prefill and a training forward.
Shapes: as in `sdpa`.
"""

from typing import NamedTuple

import torch
from megatron.core.transformer import MLATransformerConfig
from torch import Tensor
from torch.autograd.function import once_differentiable

from megarl.mcore.attention.backends import sdpa
from megarl.mcore.attention.cache_attention import CacheAttention, CacheReads, softmax_scale
from megarl.mcore.attention.segments import SegmentBatch, SegmentPlan
from megarl.mcore.attention.windows import window_of
from megarl.mcore.kernels import native


def supports(config) -> bool:
    """Whether the kernels compute the attention of a model with this config."""
    is_plain = window_of(config) is None and not isinstance(config, MLATransformerConfig)
    is_fp32 = config.params_dtype is torch.float32
    return native.is_used() and is_plain and is_fp32 and config.kv_channels % native.VECTOR == 0


plan_attention = sdpa.plan_attention


class _PackedAttention(torch.autograd.Function):
    """query [T, H, D], key, value [T', G, D] -> [T, H, D]; each query is a real one of one segment batch."""

    @staticmethod
    def forward(ctx, query, key, value, batches, scale):
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        sums = query.new_empty(query.shape[:2])
        for batch in batches:
            native.ops.segment_attention(query, key, value, *_indices(batch), scale, out, sums)
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.batches, ctx.scale = batches, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        query, key, value, out, sums = ctx.saved_tensors
        grad, total = grad.contiguous(), None
        for batch in reversed(ctx.batches):
            grads = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (query, key, value)]
            native.ops.segment_attention_backward(
                grad, query, key, value, *_indices(batch), out, sums, ctx.scale, *grads
            )
            total = grads if total is None else [x.add_(y) for x, y in zip(total, grads, strict=True)]
        return *total, None, None


def _indices(segments: SegmentBatch) -> tuple:
    return segments.queries, segments.keys, segments.last_keys, segments.real_queries


def packed_attention(query: Tensor, key: Tensor, value: Tensor, segments: SegmentPlan, scale: float | None) -> Tensor:
    scale = softmax_scale(query.shape[-1], scale)
    return _PackedAttention.apply(query, key, value, segments.batches, scale)


class NativeDecodes(NamedTuple):
    """The n decodes of a step."""

    tokens: slice | Tensor  # [n] indices of their tokens in the step
    pages: Tensor  # [n, P] int64 cache blocks
    keys: Tensor  # [n] int64 keys that each token sees
    starts: Tensor  # int64 first token of each run of tokens with the same pages, which share their reads; then n


def plan_cache_reads(
    queries: Tensor, keys: Tensor, pages: Tensor, total: int, cache: Tensor, window: None = None,
    token_bytes: int | None = None,
) -> CacheReads:  # fmt: skip
    first, single = queries.cumsum(0) - queries, queries == 1
    if bool(single.all()):
        return CacheReads([_decode_reads(slice(0, len(keys)), keys, pages, cache)], [], total)
    decodes, prompts = single.nonzero().flatten(), (~single).nonzero().flatten()
    prefills = sdpa.plan_prefills(first[prompts], queries[prompts], keys[prompts], pages[prompts], cache)
    decoding = [_decode_reads(first[decodes], keys[decodes], pages[decodes], cache)] if len(decodes) else []
    return CacheReads(decoding, prefills, total)


def _decode_reads(tokens: slice | Tensor, keys: Tensor, pages: Tensor, cache: Tensor) -> NativeDecodes:
    pages = pages[:, : -(-int(keys.max()) // cache.shape[1])].contiguous()
    is_new = (pages[1:] != pages[:-1]).any(1).nonzero().flatten() + 1
    starts = torch.cat([is_new.new_zeros(1), is_new, is_new.new_full((1,), len(keys))])
    return NativeDecodes(tokens, pages, keys.contiguous(), starts)


class NativePagedAttention(CacheAttention):
    """Attention over the paged cache."""

    def _decode(self, query: Tensor, cache: Tensor, reads: NativeDecodes, scale: float | None) -> Tensor:
        scale = softmax_scale(query.shape[-1], scale)
        return native.ops.cache_attention(query, cache, reads.pages, reads.keys, reads.starts, scale).view(query.shape)

    def _prefill(self, query: Tensor, cache: Tensor, reads: list[SegmentBatch], scale: float | None, result: Tensor):
        (key, value), scale = cache.flatten(0, 1).unbind(2), softmax_scale(query.shape[-1], scale)
        heads, out = query.flatten(1, 2), result.flatten(1, 2)
        for segments in reads:
            native.ops.segment_attention(heads, key, value, *_indices(segments), scale, out, None)


PagedAttention = NativePagedAttention  # the name of a backend's
