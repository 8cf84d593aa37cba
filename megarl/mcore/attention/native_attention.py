"""Attention by the compiled kernels (`kernels.native`): no copies of keys and values, in training and in rollout.

`--attention-backend sdpa` uses it for models in fp32 on a CPU without a window, softcap, sinks or latents. A query's
result depends on its query and its keys alone, and is the same in a decode step, a prefill and a training forward.
Shapes: as in `sdpa`.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from megatron.core.transformer import MLATransformerConfig
from torch import Tensor
from torch.autograd.function import once_differentiable

from megarl.mcore.attention.backends import sdpa
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
            _attend(query, key, value, batch, scale, out, sums)
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


def _attend(
    query: Tensor, key: Tensor, value: Tensor, segments: SegmentBatch, scale: float, out: Tensor,
    sums: Tensor | None = None,
):  # fmt: skip
    """Writes the outputs of the segments' real queries to their rows of `out` [T, H, D]; `sums` [T, H]: receives the
    logarithms of their softmax sums."""
    native.ops.segment_attention(query, key, value, *_indices(segments), scale, out, sums)


def softmax_scale(channels: int, scale: float | None) -> float:
    """The factor of the scores: 1/√D unless the model has another one."""
    return 1 / math.sqrt(channels) if scale is None else scale


def packed_attention(query: Tensor, key: Tensor, value: Tensor, segments: SegmentPlan, scale: float | None) -> Tensor:
    scale = softmax_scale(query.shape[-1], scale)
    return _PackedAttention.apply(query, key, value, segments.batches, scale)


class _DecodeReads(NamedTuple):
    """The n decodes of a step."""

    tokens: slice | Tensor  # [n] indices of their tokens in the step
    pages: Tensor  # [n, P] int64 cache blocks
    keys: Tensor  # [n] int64 keys that each token sees
    starts: Tensor  # int64 first token of each run of tokens with the same pages, which share their reads; then n


@dataclass(frozen=True)
class NativeReads:
    """The cache reads of a step, the same for all layers."""

    decodes: _DecodeReads | None
    prefills: list[SegmentBatch]
    total: int  # T

    @property
    def only_decodes(self) -> bool:
        """Whether each token of the step is a decoded one."""
        return self.decodes is not None and len(self.decodes.keys) == self.total


def plan_cache_reads(
    queries: Tensor, keys: Tensor, pages: Tensor, total: int, cache: Tensor, window: None = None,
    token_bytes: int | None = None,
) -> NativeReads:  # fmt: skip
    first, single = queries.cumsum(0) - queries, queries == 1
    if bool(single.all()):
        return NativeReads(_decode_reads(slice(len(keys)), keys, pages, cache), [], total)
    decodes, prompts = single.nonzero().flatten(), (~single).nonzero().flatten()
    prefills = sdpa.plan_prefills(first[prompts], queries[prompts], keys[prompts], pages[prompts], cache)
    decoding = _decode_reads(first[decodes], keys[decodes], pages[decodes], cache) if len(decodes) else None
    return NativeReads(decoding, prefills, total)


def _decode_reads(tokens: slice | Tensor, keys: Tensor, pages: Tensor, cache: Tensor) -> _DecodeReads:
    pages = pages[:, : -(-int(keys.max()) // cache.shape[1])].contiguous()
    is_new = (pages[1:] != pages[:-1]).any(1).nonzero().flatten() + 1
    starts = torch.cat([is_new.new_zeros(1), is_new, is_new.new_full((1,), len(keys))])
    return _DecodeReads(tokens=tokens, pages=pages, keys=keys.contiguous(), starts=starts)


class NativePagedAttention:
    """Attention over the paged cache."""

    def __call__(self, query: Tensor, cache: Tensor, reads: NativeReads, scale: float | None = None) -> Tensor:
        """query [T, G, R, D] and a layer's cache [blocks, block, G, 2, D] with the new keys -> [T, G·R·D]."""
        scale = softmax_scale(query.shape[-1], scale)
        if reads.only_decodes:
            return _decode(query, cache, reads.decodes, scale)
        query_heads, (key, value) = query.flatten(1, 2), cache.flatten(0, 1).unbind(2)
        out = query_heads.new_zeros(query_heads.shape)
        result = out.flatten(1)
        if reads.decodes is not None:
            result[reads.decodes.tokens] = _decode(query[reads.decodes.tokens], cache, reads.decodes, scale)
        for segments in reads.prefills:
            _attend(query_heads, key, value, segments, scale, out)
        return result


PagedAttention = NativePagedAttention  # the name of a backend's


def _decode(query: Tensor, cache: Tensor, reads: _DecodeReads, scale: float) -> Tensor:
    return native.ops.cache_attention(query, cache, reads.pages, reads.keys, reads.starts, scale)
