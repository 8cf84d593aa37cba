"""`--attention-backend sdpa` (the default): attention through PyTorch's SDPA, in training and over the paged KV cache.

One SDPA call per segment batch. In rollout, decodes read their pages through a scratch buffer that fits in the CPU
cache; prefills run as in training. The cache must be finite even where a page has no key yet: 0 · NaN is NaN.
Shapes: N requests, T tokens, H query heads, G key/value groups of R query heads each, D channels per head.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from megarl.mcore import device
from megarl.mcore.attention.cache_attention import CacheAttention, CacheReads, Latents, StepRequests, rows_of
from megarl.mcore.attention.segments import (  # noqa: F401  plan_attention is one of the backend's functions
    SegmentBatch,
    SegmentPlan,
    cut_segments,
    drop_unseen,
    group_by_size,
    padded_key_count,
    plan_attention,
    plan_segments,
)
from megarl.mcore.kernels.batch_invariance import MIN_ROWS

SCRATCH_BYTES = 2**23  # maximum bytes of keys and values gathered at once


class DecodeReads(NamedTuple):
    """The n decodes that one kernel call takes."""

    tokens: slice | Tensor  # [n] indices of their tokens in the step
    pages: Tensor  # [n·P] int64 cache blocks
    mask: Tensor  # [n, 1, 1, K] in the queries' dtype: 0 for a key, −∞ for padding


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
    return out.transpose(1, 2).flatten(0, 1)[segments.real_queries]


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, segments: SegmentPlan, scale: float | None, attend=attend_segments
) -> Tensor:
    """Causal attention of a packed micro-batch: query [T, H, D] of this rank, key and value [T', G, D] of the whole
    stream -> [T, H, D]. `attend`: the kernel, with the arguments of `attend_segments`."""

    def attended(batch: SegmentBatch) -> Tensor:
        keys, values = gather_rows(key, batch.keys), gather_rows(value, batch.keys)
        return attend(query, keys, values, batch, scale)

    return torch.cat([attended(batch) for batch in segments.batches])[segments.restore]


def plan_cache_reads(requests: StepRequests) -> CacheReads:
    """Returns the cache reads of a step."""
    row = requests.token_bytes or requests.cache[0, 0].numel() * requests.cache.element_size()
    return requests._replace(token_bytes=row).plan(_plan_decodes, plan_prefills)


def _plan_decodes(tokens: slice | Tensor, requests: StepRequests) -> list[DecodeReads]:
    """Splits n decodes into kernel calls of at most `SCRATCH_BYTES`, sorted by length if lengths differ much."""
    _, keys, pages, _, cache, window, row = requests
    device, block = cache.device, cache.shape[1]
    if window is not None:
        keys, pages = drop_unseen(keys, pages, window, block)
    padded = len(keys) * int(keys.max())
    if padded * row > SCRATCH_BYTES and padded > 1.25 * int(keys.sum()):
        order = keys.argsort(stable=True)
        tokens = order if isinstance(tokens, slice) else tokens[order]
        keys, pages = keys[order], pages[order]
    reads = []
    for call in _decode_calls(keys.tolist(), row):
        width = padded_key_count(int(keys[call].max()), device)
        used = min(-(-width // block), pages.shape[1])
        column, count = torch.arange(min(width, used * block)), keys[call].unsqueeze(1)
        is_hidden = column >= count if window is None else (column >= count) | (column < count - window)
        mask = torch.zeros(is_hidden.shape, dtype=cache.dtype).masked_fill_(is_hidden, -math.inf)[:, None, None, :]
        indices = call if isinstance(tokens, slice) else tokens[call].to(device)
        reads.append(DecodeReads(indices, pages[call, :used].flatten().to(device), mask.to(device)))
    return reads


def _decode_calls(lengths: list[int], row: int) -> Iterator[slice]:
    """Cuts decodes of `lengths` keys, padded to the longest of a call, into calls of at most `SCRATCH_BYTES`."""
    start, longest = 0, 0
    for end, length in enumerate(lengths):
        longest = max(longest, length)
        if end > start and (end + 1 - start) * longest * row > SCRATCH_BYTES:
            yield slice(start, end)
            start, longest = end, length
    yield slice(start, len(lengths))


def plan_prefills(first: Tensor, requests: StepRequests) -> list[SegmentBatch]:
    """Returns the segment batches of n prefills, whose keys are rows of the flattened cache: of `SCRATCH_BYTES`, unless
    `token_bytes` is None."""
    first, queries, keys, pages = (x.numpy() for x in (first, *requests[:3]))
    (*_, cache, window, row) = requests
    block, batches = cache.shape[1], []
    is_square, read = queries == keys, keys
    unseen = np.zeros_like(keys)
    if window is not None:
        segment, offset, queries, keys, unseen = cut_segments(queries, keys, window)
        first, pages = first[segment] + offset, pages[segment]
        is_square, read = (queries == keys) & (keys <= window), keys - unseen
    # Segments are grouped as in packed training; the keys come from pages.
    for is_causal, members in group_by_size(is_square, queries, read):
        limit = len(members) if row is None else max(1, SCRATCH_BYTES // (row * int(read[members].max())))
        for batch in np.split(members, range(limit, len(members), limit)):

            def cache_rows(columns, blocks=pages[batch], unseen=unseen[batch, None]):
                positions = unseen + columns
                return np.take_along_axis(blocks, positions // block, 1) * block + positions % block

            plan = plan_segments(first[batch], queries[batch], read[batch], is_causal, cache_rows)
            batches.append(SegmentBatch(window, *device.to_device(plan)))
    return batches


def _by_head(cache: Tensor | Latents, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [n, K, …] of a cache -> their keys and values [n, G, K, D]."""
    key, value = cache.expand(rows) if isinstance(cache, Latents) else rows.unbind(3)
    return key.transpose(1, 2), value.transpose(1, 2)


class PagedAttention(CacheAttention):
    """Attention over the paged cache, with one scratch buffer for all layers and steps."""

    def __init__(self):
        self._scratch: Tensor | None = None

    def _gather_pages(self, cache: Tensor | Latents, pages: Tensor, width: int, count: int) -> tuple[Tensor, Tensor]:
        """Cache [blocks, block, G, 2, D], or latents -> keys and values [n, G, K, D], the first K of pages [n·P]; views
        of the scratch buffer, or expanded."""
        return _by_head(cache, self._page_rows(rows_of(cache), pages, width, count))

    def _page_rows(self, cache: Tensor, pages: Tensor, width: int, count: int) -> Tensor:
        """Cache [blocks, block, …] -> [n, K, …], the first K rows of pages [n·P]; a view of the scratch buffer."""
        size, scratch = len(pages) * cache[0].numel(), self._scratch
        if scratch is None or scratch.numel() < size or scratch.dtype != cache.dtype or scratch.device != cache.device:
            scratch = self._scratch = cache.new_empty(size)
        rows = scratch[:size].view(len(pages), -1)
        torch.index_select(cache.flatten(1), 0, pages, out=rows)
        return rows.view(count, -1, *cache.shape[2:])[:, :width]

    _attend = staticmethod(attend_segments)

    def _prefill(
        self, query: Tensor, cache: Tensor, reads: list[SegmentBatch], scale: float | None, result: Tensor, **options
    ):
        for segments in reads:
            rows = rows_of(cache).flatten(0, 1).index_select(0, segments.keys.flatten())
            key, value = _by_head(cache, rows.unflatten(0, segments.keys.shape))
            out = self._attend(query.flatten(1, 2), key, value, segments, scale, **options)
            result[segments.queries.flatten()[segments.real_queries]] = out.view(-1, *query.shape[1:])

    def _decode(self, query: Tensor, cache: Tensor, reads: DecodeReads, scale: float | None) -> Tensor:
        """[n, G, R, D] -> [n, G, R, D]. The heads of a group are rows of one product with the group's keys."""
        count, groups, heads, channels = query.shape
        # A product of fewer rows uses another kernel, so the rows are repeated.
        copies = MIN_ROWS // math.gcd(heads, MIN_ROWS)
        if copies > 1:
            query = query.unsqueeze(2).expand(-1, -1, copies, -1, -1).reshape(count, groups, -1, channels)
            query = query.contiguous()  # one head's copies would be views of one row
        key, value = self._gather_pages(cache, reads.pages, reads.mask.shape[-1], count)
        return sdpa(query, key, value, reads.mask, scale=scale)[:, :, :heads]
