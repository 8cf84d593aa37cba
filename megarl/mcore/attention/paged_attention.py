"""Attention over the paged cache of the rollout engine: how the new tokens of a step find their keys.

Requests with one new token, in most steps all of them, are read page by page through a scratch that stays in the
processor's cache; requests with more, prompts, go the way of a packed micro-batch. The engine's memory must hold
finite numbers wherever a page that is read has no key yet: such keys are masked, but 0 · NaN would still be NaN.
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

SCRATCH_BYTES = 2**23  # bytes of keys and values that are gathered at once


class DecodeReads(NamedTuple):
    """Requests with one new token each, n of them, that one call of the kernel takes."""

    tokens: slice | Tensor  # [n] places of their tokens in the step
    pages: Tensor  # [n·P] int64 blocks of the cache
    mask: Tensor  # [n, 1, 1, K] of the queries' type: 0 where a key is seen, −∞ elsewhere


@dataclass(frozen=True)
class CacheReads:
    """What the new tokens of a step read, the same for all layers."""

    decoding: list[DecodeReads]
    prompts: list[SegmentBatch]
    total: int  # T


class PrefillDedup(NamedTuple):
    """Prompts of a step that come several times, as a group's samples do, are read once, for all."""

    requests: Tensor  # [N'] those that are read
    kept: Tensor  # [T'] tokens of theirs, and padding
    source: Tensor  # [T] where among these each token of the step finds its numbers


def deduplicate_prefills(tokens: Tensor, queries: Tensor, keys: Tensor) -> PrefillDedup | None:
    """None where no two prompts are alike, or fewer rows were left than matrix products need.

    Args:
        tokens: [T] new tokens of the step and its padding, on the host.
        queries, keys: [N] as of `plan_reads`; only a request without older keys may be another's twin.
    """
    starts, is_whole = queries.cumsum(0) - queries, queries == keys
    written, leaders = tokens.tolist(), {}  # text -> the first request that has it
    bounds = zip(starts.tolist(), queries.tolist(), is_whole.tolist(), strict=True)
    texts = [tuple(written[a : a + n]) if whole else i for i, (a, n, whole) in enumerate(bounds)]
    holders = torch.tensor([leaders.setdefault(text, i) for i, text in enumerate(texts)])
    requests = holders.unique()
    sizes, padding = queries[requests], torch.arange(int(queries.sum()), len(tokens))
    left = int(sizes.sum())
    if len(requests) == len(queries) or left + len(padding) < MIN_ROWS:
        return None
    found = (sizes.cumsum(0) - sizes)[torch.searchsorted(requests, holders)]
    kept = torch.cat([expand_ranges(starts[requests], sizes), padding])
    return PrefillDedup(requests, kept, torch.cat([expand_ranges(found, queries), left + torch.arange(len(padding))]))


def plan_cache_reads(queries: Tensor, keys: Tensor, pages: Tensor, total: int, cache: Tensor) -> CacheReads:
    """Reads of a step; arguments on the host, but for the cache.

    Args:
        queries: [N] int64 new tokens of each request, behind each other in the step.
        keys: [N] int64 keys of each, new ones included: query i of q sees keys 0 … k − q + i.
        pages: [N, P] int64 blocks of each request; any block of finite numbers behind its last.
        total: T; tokens behind the requests' are padding, their results zeros.
        cache: [blocks, block, G, 2, D] of some layer, whose device and type reads are for.
    """
    first = queries.cumsum(0) - queries
    single = queries == 1
    if bool(single.all()):
        return CacheReads(_plan_decodes(None, keys, pages, cache), [], total)
    alone = single.nonzero().flatten()
    decoding = _plan_decodes(first[alone], keys[alone], pages[alone], cache) if len(alone) else []
    rest = (~single).nonzero().flatten()
    return CacheReads(decoding, _plan_prefills(first[rest], queries[rest], keys[rest], pages[rest], cache), total)


def _plan_decodes(tokens: Tensor | None, keys: Tensor, pages: Tensor, cache: Tensor) -> list[DecodeReads]:
    """Cuts n requests into calls of at most `SCRATCH` bytes, of similar lengths where they differ much.

    `tokens` [n]: places of their tokens; None: 0 … n − 1.
    """
    device, block = cache.device, cache.shape[1]
    row = cache[0, 0].numel() * cache.element_size()
    longest = int(keys.max())
    if len(keys) * longest * row > SCRATCH_BYTES and len(keys) * longest > 1.25 * int(keys.sum()):
        order = keys.argsort(stable=True)
        tokens, keys, pages = order if tokens is None else tokens[order], keys[order], pages[order]
    lengths, found, start = keys.tolist(), [], 0
    while start < len(lengths):
        end, longest = start, 0
        while end < len(lengths):
            wide = max(longest, lengths[end])
            if end > start and (end + 1 - start) * wide * row > SCRATCH_BYTES:
                break
            end, longest = end + 1, wide
        width = padded_key_count(longest, device)
        used = min(-(-width // block), pages.shape[1])
        width = min(width, used * block)
        unseen = torch.arange(width) >= keys[start:end].unsqueeze(1)
        mask = torch.zeros(unseen.shape, dtype=cache.dtype).masked_fill_(unseen, -math.inf)[:, None, None, :]
        places = slice(start, end) if tokens is None else tokens[start:end].to(device)
        found.append(DecodeReads(places, pages[start:end, :used].flatten().to(device), mask.to(device)))
        start = end
    return found


def _plan_prefills(first: Tensor, queries: Tensor, keys: Tensor, pages: Tensor, cache: Tensor) -> list[SegmentBatch]:
    """Pieces of n requests with several new tokens, whose keys are rows of the flattened cache."""
    first, queries, keys, pages = (x.numpy() for x in (first, queries, keys, pages))
    row, block, found = cache[0, 0].numel() * cache.element_size(), cache.shape[1], []
    # Keys read by way of pages, and queries that see all of their own prompt: the classes of packed training.
    for is_causal, members in group_by_size(queries == keys, queries, keys):
        most = max(1, SCRATCH_BYTES // (row * int(keys[members].max())))
        for part in np.split(members, range(most, len(members), most)):

            def places(column, mine=pages[part]):
                return np.take_along_axis(mine, column // block, 1) * block + column % block

            planned = plan_segments(first[part], queries[part], keys[part], is_causal, places)
            found.append(SegmentBatch.of(*device.send(planned)))
    return found


class PagedAttention:
    """Attends through scratch memory that all layers and steps share."""

    def __init__(self):
        self._scratch: Tensor | None = None

    def _pages(self, cache: Tensor, pages: Tensor, width: int, count: int) -> tuple[Tensor, Tensor]:
        """[blocks, block, G, 2, D] -> keys and values [n, G, K, D], the first K of the pages [n·P]; views of scratch
        memory."""
        need, memory = len(pages) * cache[0].numel(), self._scratch
        if memory is None or memory.numel() < need or memory.dtype != cache.dtype or memory.device != cache.device:
            memory = self._scratch = cache.new_empty(need)
        rows = memory[:need].view(len(pages), -1)
        torch.index_select(cache.flatten(1), 0, pages, out=rows)
        return rows.view(count, -1, *cache.shape[2:])[:, :width].transpose(1, 2).unbind(3)

    def __call__(self, query: Tensor, cache: Tensor, reads: CacheReads, scale: float | None = None) -> Tensor:
        """query [T, G, R, D] and a layer's cache [blocks, block, G, 2, D], new keys included -> [T, G·R·D]."""
        if len(reads.decoding) == 1 and isinstance(reads.decoding[0].tokens, slice) and not reads.prompts:
            part = reads.decoding[0]
            out = self._decode(query[part.tokens], cache, part, scale)
            if len(out) == reads.total:
                return out.flatten(1)
        result = query.new_zeros(query.shape)
        for part in reads.decoding:
            result[part.tokens] = self._decode(query[part.tokens], cache, part, scale)
        for pieces in reads.prompts:
            both = gather_rows(cache.flatten(0, 1), pieces.keys)  # [n, G, K, 2, D]
            out = attend_segments(query.flatten(1, 2), *both.unbind(3), pieces, scale)
            result[pieces.queries.flatten()[pieces.real]] = out.view(-1, *query.shape[1:])
        return result.flatten(1)

    def _decode(self, query: Tensor, cache: Tensor, part: DecodeReads, scale: float | None) -> Tensor:
        """[n, G, R, D] -> [n, G, R, D]. The heads of a group are rows of one product with the group's keys."""
        count, groups, heads, channels = query.shape
        # A product of fewer rows takes another kernel: the rows stand there several times.
        copies = MIN_ROWS // math.gcd(heads, MIN_ROWS)
        if copies > 1:
            query = query.unsqueeze(2).expand(-1, -1, copies, -1, -1).reshape(count, groups, -1, channels)
            query = query.contiguous()  # one head's copies would be views of one row
        key, value = self._pages(cache, part.pages, part.mask.shape[-1], count)
        return sdpa(query, key, value, part.mask, scale=scale)[:, :, :heads]
