"""Causal attention of segments in one launch: decoded tokens over the paged KV cache, prompts, and packed sequences.

A segment is q consecutive queries of one sequence and its k keys, read through a table of pages (a page may be one
row). A program computes a tile of queries of one group of heads, key tile by key tile (FlashAttention, 2205.14135
§3.1); with `splits` the keys are divided into parts, summed in their order (Flash-Decoding, 2311.01282 §3). Tiles and
parts follow from a query's own segment alone, so a query has the same bits in every batch; without splits also whether
it is decoded or in the middle of a packed sequence.
Shapes: n segments, T queries, G key/value groups of R query heads each, D channels per head, S parts.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megarl.mcore.kernels.cuda import operator

SPLIT_KEYS = 512  # keys of a part, at least
MAX_SPLITS = 64  # parts; what they are added up from would take too much memory otherwise
TILE_KEYS = 64  # keys that a program reads at a time
MIN_ROWS = 16  # minimum rows of a matrix product (tl.dot)


@triton.jit
def _masked_scores(q, k, position, seen, scale, window, HAS_WINDOW: tl.constexpr):
    """Scores of queries q [rows, D] and keys k [TILE, D] at `position` [TILE]; −∞ where a query does not see a key.

    `seen` [rows]: keys up to each query's own.
    """
    score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    is_seen = position[None, :] < seen[:, None]
    if HAS_WINDOW:
        is_seen = is_seen & (position[None, :] >= seen[:, None] - window)
    return tl.where(is_seen, score, -float("inf"))


@triton.jit
def _key_range(part, keys, queries, first_query, window, QUERIES: tl.constexpr, TILE: tl.constexpr,
               SPLIT: tl.constexpr, HAS_WINDOW: tl.constexpr):  # fmt: skip
    """First key that a tile of queries reads of a part, and the end of its keys."""
    before = keys - queries + first_query
    begin = part * SPLIT
    end = tl.minimum(tl.minimum(begin + SPLIT, keys), before + QUERIES)
    if HAS_WINDOW:  # parts are whole tiles
        begin = tl.maximum(begin, tl.maximum(before + 1 - window, 0) // TILE * TILE)
    return begin, end


@triton.jit
def _join_parts(
    out, sums, maxima, parts, index, count, is_row, is_channel, channel, CHANNELS: tl.constexpr, SPLITS: tl.constexpr
):
    """The outputs of some queries and heads: their parts, added in the order of the keys. Without keys they are 0."""
    is_out, sum_ = is_row[:, None] & is_channel[None, :], tl.zeros(is_row.shape, tl.float32)
    top, weighted = sum_ - float("inf"), tl.zeros(is_out.shape, tl.float32)
    for part in range(0, count):
        place = index * SPLITS + part
        # Written by other programs: not from a cache of this one's.
        own_top = tl.load(maxima + place, mask=is_row, other=-float("inf"), cache_modifier=".cg")
        own_sum = tl.load(sums + place, mask=is_row, other=0.0, cache_modifier=".cg")
        own_place = parts + place[:, None] * CHANNELS + channel[None, :]
        own = tl.load(own_place, mask=is_out, other=0.0, cache_modifier=".cg")
        higher = tl.maximum(top, own_top)
        shift = tl.where(higher == -float("inf"), 0.0, higher)
        factor, own_factor = tl.exp(top - shift), tl.exp(own_top - shift)
        weighted = weighted * factor[:, None] + own * own_factor[:, None]
        sum_, top = sum_ * factor + own_sum * own_factor, higher
    result = weighted / tl.where(sum_ == 0.0, 1.0, sum_)[:, None]
    tl.store(out + index[:, None] * CHANNELS + channel[None, :], result.to(out.dtype.element_ty), mask=is_out)


@triton.jit
def _write_part(
    out, log_sums, sums, maxima, parts, arrived, sum_, top, weighted, token, head, part, keys, total, is_row,
    is_channel, channel, HEADS: tl.constexpr, CHANNELS: tl.constexpr, SPLIT: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Writes the outputs or, of several parts, this one; the last to be there writes the outputs from all of them."""
    is_out = is_row[:, None] & is_channel[None, :]
    index = token * (tl.num_programs(1) * HEADS) + head
    if SPLITS == 1:
        result = weighted / tl.where(sum_ == 0.0, 1.0, sum_)[:, None]
        tl.store(out + index[:, None] * CHANNELS + channel[None, :], result.to(out.dtype.element_ty), mask=is_out)
        tl.store(log_sums + head * total + token, top + tl.log(sum_), mask=is_row)
    else:
        place, number = index * SPLITS + part, arrived + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        tl.store(sums + place, sum_, mask=is_row)
        tl.store(maxima + place, top, mask=is_row)
        tl.store(parts + place[:, None] * CHANNELS + channel[None, :], weighted, mask=is_out)
        tl.debug_barrier()  # all threads have written
        count = tl.cdiv(tl.maximum(keys, 1), SPLIT)
        if tl.atomic_add(number, 1) == count - 1:
            tl.store(number, 0)  # for the next layer
            _join_parts(out, sums, maxima, parts, index, count, is_row, is_channel, channel, CHANNELS, SPLITS)


@triton.jit
def _attend_part(
    query, key, value, table, segments, out, log_sums, sums, maxima, parts, arrived,
    query_row, query_head, key_row, key_group, value_row, value_group, total, scale, window,
    HEADS: tl.constexpr, HEAD_TILE: tl.constexpr, QUERIES: tl.constexpr, CHANNELS: tl.constexpr,
    CHANNEL_TILE: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr, SPLITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr, TABLE_ROW: tl.constexpr,
):  # fmt: skip
    """One part of the keys of one tile of queries. With one part it writes outputs [T, G·R, D] and log-sums [G·R, T],
    else softmax sums, maxima and weighted values of the part; the last part to be there, by the count `arrived` [n·G],
    writes the outputs from all.

    `segments` [4, n]: first query, queries, keys, first entry of the table. With `TABLE_ROW` > 0, the entries of a row
    of the table, segment i is the i-th query alone, and `segments` [n] are its keys.
    """
    segment, group, part = tl.program_id(0), tl.program_id(1), tl.program_id(2) % SPLITS
    first_query, count = tl.program_id(2) // SPLITS * QUERIES, tl.num_programs(0)
    token, queries, keys = segment, 1, tl.load(segments + segment)
    pages = table + segment.to(tl.int64) * TABLE_ROW
    if TABLE_ROW == 0:
        token, queries = keys, tl.load(segments + count + segment)
        keys = tl.load(segments + 2 * count + segment)
        pages = table + tl.load(segments + 3 * count + segment)
    if (first_query >= queries) | ((SPLITS > 1) & (part * SPLIT >= tl.maximum(keys, 1))):
        return  # `_join_parts` reads no part without keys but the first
    row, channel, column = tl.arange(0, QUERIES * HEAD_TILE), tl.arange(0, CHANNEL_TILE), tl.arange(0, TILE)
    number, head = first_query + row // HEAD_TILE, group * HEADS + row % HEAD_TILE
    is_row, is_channel = (number < queries) & (row % HEAD_TILE < HEADS), channel < CHANNELS
    token += number
    seen = keys - queries + number + 1  # keys up to each query's own
    place = query + token[:, None] * query_row + head[:, None] * query_head + channel[None, :]
    q = tl.load(place, mask=is_row[:, None] & is_channel[None, :], other=0.0)
    top = tl.full([QUERIES * HEAD_TILE], -float("inf"), tl.float32)
    sum_ = tl.zeros([QUERIES * HEAD_TILE], tl.float32)
    weighted = tl.zeros([QUERIES * HEAD_TILE, CHANNEL_TILE], tl.float32)
    begin, end = _key_range(part, keys, queries, first_query, window, QUERIES, TILE, SPLIT, HAS_WINDOW)
    for start in range(begin, end, TILE):
        position = start + column
        page = tl.load(pages + position // PAGE, mask=position < keys, other=0).to(tl.int64)
        entry = (page * PAGE + position % PAGE)[:, None]
        is_read = (position < keys)[:, None] & is_channel[None, :]
        k = tl.load(key + entry * key_row + group * key_group + channel[None, :], mask=is_read, other=0.0)
        score = _masked_scores(q, k, position, seen, scale, window, HAS_WINDOW)
        higher = tl.maximum(top, tl.max(score, 1))
        shift = tl.where(higher == -float("inf"), 0.0, higher)
        weight, factor = tl.exp(score - shift[:, None]), tl.exp(top - shift)
        v = tl.load(value + entry * value_row + group * value_group + channel[None, :], mask=is_read, other=0.0)
        weighted = tl.dot(weight.to(v.dtype), v, weighted * factor[:, None], input_precision="ieee")
        sum_, top = sum_ * factor + tl.sum(weight, 1), higher
    _write_part(
        out, log_sums, sums, maxima, parts, arrived, sum_, top, weighted, token, head, part, keys, total,
        is_row, is_channel, channel, HEADS, CHANNELS, SPLIT, SPLITS,
    )  # fmt: skip


def _launch(query, keys_values, table, segments, scale, window, max_queries=1, cut=(2**30, 1, None)):
    """Runs `_attend_part`; returns (outputs [T, G·R, D], log-sums [G·R, T]).

    Args:
        query: [T, G·R, D] with contiguous channels.
        keys_values: both [rows, G, D] with contiguous channels.
        table: of pages or rows, in which segments find their keys; how many rows a page has; `TABLE_ROW`.
        max_queries: of a segment.
        cut: keys of a part, how many parts, and for several `arrived` of `paged_decode`.
    """
    (total, heads, channels), (key, value), (pages, page, table_row) = query.shape, keys_values, table
    (split, splits, arrived), groups = cut, key.shape[1]
    each = heads // groups
    head_tile = triton.next_power_of_2(each)
    queries = max(1, MIN_ROWS // head_tile)
    out, log_sums = query.new_empty(query.shape), query.new_empty(heads, total, dtype=torch.float32)
    size = total * heads * splits if splits > 1 else 0
    sums, maxima = query.new_empty(2, size, dtype=torch.float32)
    parts = query.new_empty(size, channels, dtype=torch.float32)
    _attend_part[segments.shape[-1], groups, triton.cdiv(max_queries, queries) * splits](
        query, key, value, pages, segments, out, log_sums, sums, maxima, parts, arrived,
        query.stride(0), query.stride(1), key.stride(0), key.stride(1), value.stride(0), value.stride(1), total,
        scale, window or 0,
        HEADS=each, HEAD_TILE=head_tile, QUERIES=queries, CHANNELS=channels,
        CHANNEL_TILE=max(MIN_ROWS, triton.next_power_of_2(channels)), PAGE=page, TILE=TILE_KEYS,
        SPLIT=split if splits > 1 else 2**30, SPLITS=splits, TABLE_ROW=table_row,
        HAS_WINDOW=window is not None,
    )  # fmt: skip
    return out, log_sums


def split_of(max_keys: int) -> int:
    """Keys of a part for requests of at most so many keys: whole tiles."""
    return max(SPLIT_KEYS, triton.cdiv(max_keys, MAX_SPLITS * TILE_KEYS) * TILE_KEYS)


@operator("paged_decode", lambda query, *_, **__: query.new_empty(query.shape), mutates=("arrived",))
def paged_decode(
    query: Tensor,
    cache: Tensor,
    table: Tensor,
    lengths: Tensor,
    scale: float,
    window: int | None = None,
    arrived: Tensor | None = None,
) -> Tensor:
    """Returns the attention [N, G, R, D] of one token of each request over its keys in the cache.

    Args:
        query: [N, G, R, D].
        cache: [blocks, block, G, 2, D] keys and values of a layer.
        table: [N, P] int32 blocks of each request.
        lengths: [N] int32 keys that each token sees, its own included; 0: the result is 0.
        scale: factor of the scores.
        window: keys that a query sees, the last ones; None: all.
        arrived: [≥ N·G] int32 zeros, which it leaves so, for one call at a time: it divides the keys of long requests
            into parts. None: it does not, and the bits are those of `packed_attention`.
    """
    block, max_keys = cache.shape[1], table.shape[1] * cache.shape[1]
    split = split_of(max_keys)
    splits = 1 if arrived is None else triton.cdiv(max_keys, split)
    keys_values, tables = cache.flatten(0, 1).unbind(2), (table, block, table.stride(0))
    cut, flat = (split, splits, arrived), query.flatten(1, 2)
    out, _ = _launch(flat, keys_values, tables, lengths, scale, window, cut=cut)
    return out.view(query.shape)


def _empty_outputs(query, *_, **__):
    return query.new_empty(query.shape), query.new_empty(query.shape[1], len(query), dtype=torch.float32)


@operator("packed_attention", _empty_outputs)
def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, rows: Tensor, segments: Tensor, max_queries: int, scale: float,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns the attention [T, H, D] of packed queries [T, H, D], and log-sums [H, T] of their softmaxes.

    Args:
        query: [T, H, D]; key, value: [keys, G, D].
        rows: [Σ k] int32 rows of the keys of each segment, one segment after another.
        segments: [4, n] int32: first query, queries, keys, first of `rows`.
        max_queries: maximum queries of a segment.
        scale, window: as of `paged_decode`.
    """
    return _launch(query, (key, value), (rows, 1, 0), segments, scale, window, max_queries)
