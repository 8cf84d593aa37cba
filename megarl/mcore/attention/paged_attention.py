"""Attention over the rollout engine's paged KV cache: reads of keys and values for the new tokens of a step.

The new tokens of a step are a token stream, one request after another. Decodes (requests with one new token, in most
steps all) read their pages through a scratch buffer that fits in the CPU cache. Prefills (requests with several) run as
in training: a request's new tokens and its cached keys are an attention segment, and a segment batch is what one kernel
call takes. Unlike a shared prefix, which one sequence of a packed micro-batch holds for others, equal prompts of a step
are deduplicated as a whole. The cache must be finite even where a page has no key yet: such keys are masked, but
0 · NaN is NaN.
Shapes: N requests, T tokens of the step, G key/value groups of R query heads each, D channels per head.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from megarl.batch import expand_ranges
from megarl.mcore import device
from megarl.mcore.attention.packed_attention import attend_segments, gather_rows
from megarl.mcore.attention.segments import SegmentBatch, group_by_size, padded_key_count, plan_segments
from megarl.mcore.kernels.batch_invariance import MIN_ROWS

SCRATCH_BYTES = 2**23  # most bytes of keys and values gathered at once


class DecodeReads(NamedTuple):
    """The n decodes that one kernel call takes."""

    tokens: slice | Tensor  # [n] indices of their tokens in the step
    pages: Tensor  # [n·P] int64 cache blocks
    mask: Tensor  # [n, 1, 1, K] in the queries' dtype: 0 for a key, −∞ for padding


@dataclass(frozen=True)
class CacheReads:
    """The cache reads of a step, the same for all layers."""

    decoding: list[DecodeReads]
    prompts: list[SegmentBatch]
    total: int  # T


class PrefillDedup(NamedTuple):
    """Deduplicated prefills of a step: equal prompts, such as those of a group's samples, are computed once."""

    requests: Tensor  # [N'] int64 requests that are computed
    kept: Tensor  # [T'] int64 indices of their tokens and of padding
    source: Tensor  # [T] int64 index among the kept tokens of each token of the step


def deduplicate_prefills(tokens: Tensor, queries: Tensor, keys: Tensor) -> PrefillDedup | None:
    """Finds equal prompts; returns None if no two are equal, or if fewer than `MIN_ROWS` tokens would remain.

    Args:
        tokens: [T] new tokens of the step and its padding, on the host.
        queries, keys: [N] as in `plan_cache_reads`; only requests without cached keys are compared.
    """
    starts, is_uncached = queries.cumsum(0) - queries, queries == keys
    ids, first_requests = tokens.tolist(), {}  # prompt -> the first request with it
    bounds = zip(starts.tolist(), queries.tolist(), is_uncached.tolist(), strict=True)
    prompts = [tuple(ids[a : a + n]) if uncached else i for i, (a, n, uncached) in enumerate(bounds)]
    originals = torch.tensor([first_requests.setdefault(prompt, i) for i, prompt in enumerate(prompts)])
    requests = originals.unique()
    sizes, padding = queries[requests], torch.arange(int(queries.sum()), len(tokens))
    remaining = int(sizes.sum())
    if len(requests) == len(queries) or remaining + len(padding) < MIN_ROWS:
        return None
    kept_starts = (sizes.cumsum(0) - sizes)[torch.searchsorted(requests, originals)]
    kept = torch.cat([expand_ranges(starts[requests], sizes), padding])
    source = torch.cat([expand_ranges(kept_starts, queries), remaining + torch.arange(len(padding))])
    return PrefillDedup(requests, kept, source)


def plan_cache_reads(queries: Tensor, keys: Tensor, pages: Tensor, total: int, cache: Tensor) -> CacheReads:
    """Returns the cache reads of a step; arguments are on the host, except the cache.

    Args:
        queries: [N] int64 new tokens of each request, one request after another in the step.
        keys: [N] int64 keys of each request, including new ones: query i of q attends to keys 0 … k − q + i.
        pages: [N, P] int64 blocks of each request; any block of finite numbers after its last one.
        total: T; tokens after those of the requests are padding with zero results.
        cache: [blocks, block, G, 2, D] of any layer, for its device and dtype.
    """
    first = queries.cumsum(0) - queries
    single = queries == 1
    if bool(single.all()):
        return CacheReads(_plan_decodes(None, keys, pages, cache), [], total)
    decodes, prefills = single.nonzero().flatten(), (~single).nonzero().flatten()
    decoding = _plan_decodes(first[decodes], keys[decodes], pages[decodes], cache) if len(decodes) else []
    prompts = _plan_prefills(first[prefills], queries[prefills], keys[prefills], pages[prefills], cache)
    return CacheReads(decoding, prompts, total)


def _plan_decodes(tokens: Tensor | None, keys: Tensor, pages: Tensor, cache: Tensor) -> list[DecodeReads]:
    """Splits n decodes into kernel calls of at most `SCRATCH_BYTES`, sorted by length if lengths differ much.

    `tokens` [n]: indices of their tokens; None: 0 … n − 1.
    """
    device, block = cache.device, cache.shape[1]
    row = cache[0, 0].numel() * cache.element_size()
    longest = int(keys.max())
    if len(keys) * longest * row > SCRATCH_BYTES and len(keys) * longest > 1.25 * int(keys.sum()):
        order = keys.argsort(stable=True)
        tokens, keys, pages = order if tokens is None else tokens[order], keys[order], pages[order]
    lengths, reads, start = keys.tolist(), [], 0
    while start < len(lengths):
        end, longest = start, 0
        while end < len(lengths):
            widest = max(longest, lengths[end])
            if end > start and (end + 1 - start) * widest * row > SCRATCH_BYTES:
                break
            end, longest = end + 1, widest
        width = padded_key_count(longest, device)
        used = min(-(-width // block), pages.shape[1])
        width = min(width, used * block)
        is_padding = torch.arange(width) >= keys[start:end].unsqueeze(1)
        mask = torch.zeros(is_padding.shape, dtype=cache.dtype).masked_fill_(is_padding, -math.inf)[:, None, None, :]
        indices = slice(start, end) if tokens is None else tokens[start:end].to(device)
        reads.append(DecodeReads(indices, pages[start:end, :used].flatten().to(device), mask.to(device)))
        start = end
    return reads


def _plan_prefills(first: Tensor, queries: Tensor, keys: Tensor, pages: Tensor, cache: Tensor) -> list[SegmentBatch]:
    """Returns the segment batches of n prefills, whose keys are rows of the flattened cache."""
    first, queries, keys, pages = (x.numpy() for x in (first, queries, keys, pages))
    row, block, batches = cache[0, 0].numel() * cache.element_size(), cache.shape[1], []
    # Segments are grouped as in packed training; the keys come from pages.
    for is_causal, members in group_by_size(queries == keys, queries, keys):
        limit = max(1, SCRATCH_BYTES // (row * int(keys[members].max())))
        for batch in np.split(members, range(limit, len(members), limit)):

            def cache_rows(positions, blocks=pages[batch]):
                return np.take_along_axis(blocks, positions // block, 1) * block + positions % block

            plan = plan_segments(first[batch], queries[batch], keys[batch], is_causal, cache_rows)
            batches.append(SegmentBatch.of(*device.send(plan)))
    return batches


class PagedAttention:
    """Attention over the paged cache, with one scratch buffer for all layers and steps."""

    def __init__(self):
        self._scratch: Tensor | None = None

    def _gather_pages(self, cache: Tensor, pages: Tensor, width: int, count: int) -> tuple[Tensor, Tensor]:
        """Cache [blocks, block, G, 2, D] -> keys and values [n, G, K, D], the first K of pages [n·P]; views of the
        scratch buffer."""
        size, scratch = len(pages) * cache[0].numel(), self._scratch
        if scratch is None or scratch.numel() < size or scratch.dtype != cache.dtype or scratch.device != cache.device:
            scratch = self._scratch = cache.new_empty(size)
        rows = scratch[:size].view(len(pages), -1)
        torch.index_select(cache.flatten(1), 0, pages, out=rows)
        return rows.view(count, -1, *cache.shape[2:])[:, :width].transpose(1, 2).unbind(3)

    def __call__(self, query: Tensor, cache: Tensor, reads: CacheReads, scale: float | None = None) -> Tensor:
        """query [T, G, R, D] and a layer's cache [blocks, block, G, 2, D] with the new keys -> [T, G·R·D]."""
        if len(reads.decoding) == 1 and isinstance(reads.decoding[0].tokens, slice) and not reads.prompts:
            decodes = reads.decoding[0]
            out = self._decode(query[decodes.tokens], cache, decodes, scale)
            if len(out) == reads.total:
                return out.flatten(1)
        result = query.new_zeros(query.shape)
        for decodes in reads.decoding:
            result[decodes.tokens] = self._decode(query[decodes.tokens], cache, decodes, scale)
        for segments in reads.prompts:
            key_value = gather_rows(cache.flatten(0, 1), segments.keys)  # [n, G, K, 2, D]
            out = attend_segments(query.flatten(1, 2), *key_value.unbind(3), segments, scale)
            result[segments.queries.flatten()[segments.real]] = out.view(-1, *query.shape[1:])
        return result.flatten(1)

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
