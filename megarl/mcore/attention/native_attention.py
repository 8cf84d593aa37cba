"""Attention by the compiled kernels (`kernels.native`): no copies of keys and values, in training and in rollout.

`--attention-backend auto` and `sdpa` use it for models in fp32 on a CPU, with windows, softcaps, sinks or latents too,
and for models whose queries choose keys in bf16, too: numbers are widened before and rounded after.
A query's result depends on its query and its keys alone, and is the same in a decode step, a prefill and a training
forward, however many keys there are. Values may have other channels than keys.
Shapes: as in `sdpa`; V channels of a value.
"""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from megarl.mcore.attention.backends import sdpa
from megarl.mcore.attention.cache_attention import CacheAttention, CacheReads, Latents, StepRequests, softmax_scale
from megarl.mcore.attention.segments import SegmentBatch, SegmentPlan
from megarl.mcore.kernels import native, with_gradient
from megarl.mcore.kernels.batch_invariance import VECTOR, is_exact


def supports(config) -> bool:
    """Whether the kernels compute the attention of a model with this config."""
    is_wide = config.params_dtype is torch.float32 or config.dsa_indexer_topk is not None
    return native.is_used() and is_wide and not is_exact(config)


plan_attention = sdpa.plan_attention
takes_narrow_values = True  # of a cache of latents: values may have other channels than keys


def _packed_attention_gradient(ctx, grad):
    query, key, value, sinks, out, sums = ctx.saved_tensors
    grad, total = grad.contiguous(), None
    for batch in reversed(ctx.batches):
        grads = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (query, key, value)]
        native.ops.segment_attention_backward(
            grad, query, key, value, batch.queries, batch.keys, batch.last_keys, batch.real_queries, out, sums,
            ctx.scale, batch.window, ctx.softcap, grads[0], grads[1], grads[2],
        )  # fmt: skip
        total = grads if total is None else [x.add_(y) for x, y in zip(total, grads, strict=True)]
    of_sinks = None
    if sinks is not None:  # −share · ∂y·y, with the share of the softmax that a sink takes
        of_sinks = -((sinks - sums).exp() * (grad * out).sum(-1)).sum(0)
    return *total, of_sinks, None, None, None


@with_gradient(_packed_attention_gradient)
def _packed_attention(ctx, query, key, value, sinks, batches, scale, softcap):
    """query [T, H, D], key [T', G, D], value [T', G, V] and sinks [H] or None -> [T, H, V]; each query is a real one of
    one segment batch."""
    out = query.new_empty(*query.shape[:2], value.shape[2])
    sums = query.new_empty(query.shape[:2])
    for batch in batches:
        attend(query, key, value, batch, (scale, softcap, sinks), out, sums)
    ctx.save_for_backward(query, key, value, sinks, out, sums)
    ctx.batches, ctx.scale, ctx.softcap = batches, scale, softcap
    return out


def attend(query, key, value, segments: SegmentBatch, score: tuple, out: Tensor, sums: Tensor | None = None):
    """Writes to the real queries' rows of `out` [T, H, V], and of `sums` [T, H] their log-sums."""
    s, (scale, softcap, sinks) = segments, score
    native.ops.segment_attention(
        query, key, value, s.queries, s.keys, s.last_keys, s.real_queries, scale, s.window, softcap, sinks, out, sums
    )


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, segments: SegmentPlan, scale: float | None, softcap=None, sinks=None
) -> Tensor:
    """As that of `sdpa`, with `softcap` and the `sinks` [H] of this rank's heads; value [T', G, V] -> [T, H, V]."""
    scale = softmax_scale(query.shape[-1], scale)
    if query.dtype is not torch.float32:
        out = packed_attention(query.float(), key.float(), value.float(), segments, scale, softcap, sinks)
        return out.to(query.dtype)
    if query.shape[-1] % VECTOR or value.shape[-1] % VECTOR:  # zeros at the end of a chain of sums change no bit
        q, k, v = (pad(x, (0, -x.shape[-1] % VECTOR)) for x in (query, key, value))
        return packed_attention(q, k, v, segments, scale, softcap, sinks)[..., : value.shape[-1]]
    return _packed_attention(query, key, value, sinks, segments.batches, scale, softcap)


class NativeDecodes(NamedTuple):
    """The n decodes of a step."""

    tokens: slice | Tensor  # [n] indices of their tokens in the step
    pages: Tensor  # [n, P] int64 cache blocks
    keys: Tensor  # [n] int64 keys up to each token
    starts: Tensor  # int64 first token of each run of tokens with the same pages, which share their reads; then n
    window: int | None  # keys that a token sees, the last ones; None: all
    # Of latents, which are expanded part by part: rows [m] of the flattened cache; segments whose keys are among them.
    parts: list[tuple[Tensor, SegmentBatch]] | None = None


def plan_cache_reads(requests: StepRequests) -> CacheReads:
    """As that of `sdpa`. `token_bytes`: of a token's keys and values when its latent is expanded; else None."""
    return requests.plan(_plan_decodes, sdpa.plan_prefills)


def _plan_decodes(tokens: slice | Tensor, requests: StepRequests) -> list[NativeDecodes]:
    _, keys, pages, _, cache, window, token_bytes = requests
    pages = pages[:, : -(-int(keys.max()) // cache.shape[1])].contiguous()
    is_new = (pages[1:] != pages[:-1]).any(1).nonzero().flatten() + 1
    starts = torch.cat([is_new.new_zeros(1), is_new, is_new.new_full((1,), len(keys))])
    plan = NativeDecodes(tokens, pages, keys.contiguous(), starts, window)
    if token_bytes is None:
        return [plan]
    lengths = torch.stack([part.max() for part in keys.split(starts.diff().tolist())])
    limit = sdpa.SCRATCH_BYTES // token_bytes
    parts = [
        _latent_part(pages, keys, starts[part.start : part.stop + 1], lengths[part], cache.shape[1], window)
        for part in _parts(lengths.tolist(), limit)
    ]
    return [plan._replace(parts=parts)]


def _parts(lengths: list[int], limit: int) -> Iterator[slice]:
    """Cuts runs of `lengths` rows into parts of at most `limit` rows, or of one run."""
    start, rows = 0, 0
    for end, length in enumerate(lengths):
        if end > start and rows + length > limit:
            yield slice(start, end)
            start, rows = end, 0
        rows += length
    yield slice(start, len(lengths))


def _latent_part(pages: Tensor, keys: Tensor, starts: Tensor, lengths: Tensor, block: int, window: int | None):
    """Rows of the cache, and segments of the decodes that read them: one for each run of decodes with the same pages.

    starts [r + 1]: the first decode of each run, then their end; lengths [r]: keys of a run. The last decode of a run
    stands for padding.
    """
    owner = torch.arange(len(lengths)).repeat_interleave(lengths)
    base = lengths.cumsum(0) - lengths
    position = torch.arange(len(owner)) - base[owner]
    rows = pages[starts[:-1][owner], position // block] * block + position % block
    counts, width = starts.diff(), int(lengths.max())
    place = torch.arange(int(counts.max()))
    queries = starts[:-1, None] + torch.minimum(place, counts[:, None] - 1)
    real = (place < counts[:, None]).flatten().nonzero().flatten()
    segments = SegmentBatch(
        queries=queries,
        keys=base[:, None] + torch.minimum(torch.arange(width), lengths[:, None] - 1),
        last_keys=keys[queries] - 1,
        real_queries=real,
        window=window,
    )
    return rows, segments


class NativePagedAttention(CacheAttention):
    """Attention over the paged cache; of `Latents` a read expands the rows that it needs, each once."""

    def _new_result(self, query: Tensor, cache: Tensor | Latents) -> Tensor:
        channels = cache.value_channels if isinstance(cache, Latents) else query.shape[-1]
        return query.new_zeros(*query.shape[:-1], channels)

    def _decode(self, query, cache, reads: NativeDecodes, scale, softcap=None, sinks=None) -> Tensor:
        scale = softmax_scale(query.shape[-1], scale)
        if reads.parts is None:
            out = native.ops.cache_attention(
                query, cache, reads.pages, reads.keys, reads.starts, scale, reads.window, softcap, sinks
            )
            return out.view(query.shape)
        out, heads = self._new_result(query, cache), query.flatten(1, 2)
        for rows, segments in reads.parts:
            key, value = cache.expand(cache.rows.flatten(0, 1).index_select(0, rows))
            attend(heads, key, value, segments, (scale, softcap, sinks), out.flatten(1, 2))
        return out

    def _prefill(self, query, cache, reads: list[SegmentBatch], scale, result, softcap=None, sinks=None):
        score = softmax_scale(query.shape[-1], scale), softcap, sinks
        for segments in reads:
            attend(query.flatten(1, 2), *_keys_of(cache, segments), score, result.flatten(1, 2))


def _keys_of(cache: Tensor | Latents, segments: SegmentBatch) -> tuple[Tensor, Tensor, SegmentBatch]:
    """Keys and values, and the segments with keys among these."""
    if not isinstance(cache, Latents):
        key, value = cache.flatten(0, 1).unbind(2)
        return key, value, segments
    key, value = cache.expand(cache.rows.flatten(0, 1).index_select(0, segments.keys.flatten()))
    places = torch.arange(segments.keys.numel()).view_as(segments.keys)
    return key, value, dataclasses.replace(segments, keys=places)


PagedAttention = NativePagedAttention  # the name of a backend's
