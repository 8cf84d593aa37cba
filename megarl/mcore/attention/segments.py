"""Attention segments of a packed token stream, and the segment batches that one dense kernel call takes.

A segment is q consecutive queries of one sequence, with the k tokens from its start to the last query as keys: what
the stream, or with context parallelism one chunk, holds of a sequence. A segment batch is segments of similar size,
padded to the longest. Segments of sequences with a shared prefix read its keys at the holder. All plans follow from the
sequence lengths, on the host.

With `--window-size N,0` a token sees itself and the N tokens before it (2004.05150 §3.1); a Hugging Face
`sliding_window` of W is `--window-size W-1,0`. A key outside the window is masked, so its weight is exactly 0. Whole
blocks of keys that no query sees are not read, which keeps the bits: the CPU kernel sums blocks of `KEY_BLOCK`.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from megarl.batch import SharedPrefix, expand_array_counts
from megarl.mcore import device
from megarl.mcore.kernels.batch_invariance import MIN_ROWS, VECTOR

FULL, WINDOW = 0, 1  # kinds of layers: plans by kind are pairs with these indices
KEY_BLOCK = 512  # keys that torch's CPU kernel takes at a time (kvSplitSize); a multiple of the cache's blocks


def padded_key_count(longest: int, device: torch.device) -> int:
    """Returns the padded number of keys for segments of at most `longest` keys."""
    return -(-longest // VECTOR) * VECTOR if device.type == "cpu" else longest


@dataclass(frozen=True)
class SegmentBatch:
    """The n segments that one dense kernel call takes, padded to Q queries and K keys."""

    window: int | None  # keys that a query sees, the last ones; None: all
    queries: Tensor  # [n, Q] int64 indices among this rank's tokens; padding repeats the last query
    keys: Tensor  # [n, K] int64 indices in the stream or rows of the KV cache; padding repeats the last
    real_queries: Tensor  # [m] ascending int64 indices in [n·Q] of the queries that are not padding
    last_keys: Tensor | None = None  # [n, Q] int64 last key that each query attends to; None: causal, query i has key i

    @functools.cached_property
    def mask(self) -> Tensor | None:
        """[n, 1, Q, K] bool, True where attended; None: causal."""
        if self.last_keys is None:
            return None
        column, last_key = torch.arange(self.keys.shape[1], device=self.keys.device), self.last_keys.unsqueeze(2)
        mask = column <= last_key
        if self.window is not None:
            mask &= column > last_key - self.window
        return mask.unsqueeze(1)


class SegmentPlan(NamedTuple):
    """The attention segments of a micro-batch on this rank, for layers with or without a window."""

    batches: list[SegmentBatch]
    restore: Tensor  # [T/c] int64 index of each of this rank's queries in the batches' results


# How a rank's tokens attend, planned on the host for the kernels of an attention backend: arrays, int64, to send to the
# device, and what makes of these, there, what the backend reads.
HostPlan = tuple[list[np.ndarray], Callable[[list[Tensor]], Any]]


def size_buckets(longest: int) -> list[int]:
    """Returns upper limits of segment sizes per bucket; padding in a bucket is at most half of the real size."""
    widths, width = [], VECTOR
    while width < longest:
        widths.append(width)
        width = max(width + VECTOR, (width * 3 // 2) // VECTOR * VECTOR)
    return [*widths, width]


def group_by_size(is_causal: np.ndarray, queries: np.ndarray, keys: np.ndarray) -> Iterator[tuple[bool, np.ndarray]]:
    """Yields (is causal, indices of segments) of each segment batch: segments of similar sizes.

    `is_causal` [n]: segments to run with as many queries as keys; others are also grouped by their queries [n].
    """
    limits = size_buckets(int(keys.max()))
    queries, keys = (np.searchsorted(limits, x) for x in (queries * ~is_causal, keys))
    buckets = (is_causal * len(limits) + queries) * len(limits) + keys  # one number of three digits
    for bucket in np.unique(buckets):
        yield bool(bucket >= len(limits) ** 2), np.flatnonzero(buckets == bucket)


def plan_segments(first, queries, keys, is_causal: bool, key_indices: Callable) -> list[np.ndarray]:
    """Returns the tensors of a `SegmentBatch`, on the host; `last_keys` unless causal.

    Args:
        first, queries, keys: [n] index of the first query, numbers of queries and keys.
        key_indices: maps the positions [n, K] of keys in their sequences to their indices.
    """
    padded_queries, padded_keys = int(queries.max()), padded_key_count(int(keys.max()), device.device())
    padded_queries = padded_keys if is_causal else -(-padded_queries // MIN_ROWS) * MIN_ROWS
    row = np.minimum(np.arange(padded_queries), queries[:, None] - 1)
    column = np.minimum(np.arange(padded_keys), keys[:, None] - 1)
    real = np.flatnonzero(np.arange(padded_queries) < queries[:, None])
    plan = [first[:, None] + row, key_indices(column), real]
    # Padded queries attend to the keys of the last real query: a row without a key would be NaN.
    return plan if is_causal else [*plan, (keys - queries)[:, None] + row]


class TokenStream(NamedTuple):
    """The token stream of N sequences: the range that each holds, and its shared prefix; all [N].

    Padding is one more sequence, after the others.
    """

    starts: np.ndarray  # first stream index of a sequence, which holds [start, end)
    ends: np.ndarray
    holders: np.ndarray  # the sequence that holds its shared prefix: itself if none
    prefix_lengths: np.ndarray  # tokens of its prefix that the holder holds

    @classmethod
    def of(cls, lengths: np.ndarray, shared: SharedPrefix | None, padded: Callable[[int], int]) -> "TokenStream":
        """Returns the stream of sequences with lengths [N]; `padded` maps a number of tokens to the padded number."""
        holders, prefixes = np.arange(len(lengths)), np.zeros(len(lengths), np.int64)
        if shared is not None:
            holders, prefixes = shared.holders.numpy(), shared.tokens.numpy()
        held = lengths - prefixes
        padding = padded(int(held.sum())) - int(held.sum())
        if padding:
            held, holders = np.append(held, padding), np.append(holders, 0)
            prefixes = np.append(prefixes, 0)
        ends = held.cumsum()
        return cls(starts=ends - held, ends=ends, holders=holders, prefix_lengths=prefixes)

    def positions(self) -> np.ndarray:
        """Returns [stream] positions of the tokens in their sequences."""
        return np.arange(self.ends[-1]) - np.repeat(self.starts - self.prefix_lengths, self.ends - self.starts)


class Segments(NamedTuple):
    """n attention segments, all fields [n] int64. The first `prefix_length` keys are in the stream from `holder_start`
    on, the other keys from `start` on; the first `unseen` of all keys are not read."""

    first: np.ndarray  # index of the first query among this rank's tokens
    queries: np.ndarray  # number of queries
    keys: np.ndarray  # number of keys
    start: np.ndarray
    prefix_length: np.ndarray
    holder_start: np.ndarray
    unseen: np.ndarray

    def at(self, index: np.ndarray) -> "Segments":
        """Returns some segments; `index` [m]: their numbers, or [n] bool: which."""
        return Segments(*(field[index] for field in self))

    def within(self, window: int) -> "Segments":
        """Cuts segments that are longer than the window."""
        segment, offset, queries, keys, unseen = cut_segments(self.queries, self.keys, window)
        pieces = self.at(segment)
        return pieces._replace(first=pieces.first + offset, queries=queries, keys=keys, unseen=unseen)

    def key_indices(self, columns: np.ndarray) -> np.ndarray:
        """Numbers [n, K] of keys that are read -> indices in the stream."""
        start, prefix, holder, unseen = (
            x[:, None] for x in (self.start, self.prefix_length, self.holder_start, self.unseen)
        )
        positions = unseen + columns
        return np.where(positions < prefix, holder, start - prefix) + positions


def segments_of_stream(stream: TokenStream, chunks: list[tuple[int, int]]) -> Segments:
    """Returns the segments of this rank's chunks, [start, stop) each: what they contain of each sequence's range."""
    segments, offset = [], 0
    for start, stop in chunks:
        first, end = stream.starts.clip(min=start), stream.ends.clip(max=stop)
        keys, is_inside = stream.prefix_lengths + end - stream.starts, first < end
        found = Segments(
            first=offset + first - start,
            queries=end - first,
            keys=keys,
            start=stream.starts,
            prefix_length=stream.prefix_lengths,
            holder_start=stream.starts[stream.holders],
            unseen=np.zeros_like(keys),
        )
        segments.append(found.at(is_inside))
        offset += stop - start
    return Segments._make(np.concatenate([each[field] for each in segments]) for field in range(len(Segments._fields)))


def plan_segment_batches(segments: Segments, is_whole: bool, window: int | None = None) -> list[list[np.ndarray]]:
    """Returns the plan of each segment batch, as `plan_segments`.

    Args:
        is_whole: this rank holds the whole stream, so that queries have the indices of keys.
        window: keys that a query sees; None: all.

    Causal kernels are faster than those that take a mask, but need a query for each key. Example: a sequence of 10
    tokens whose first 3 another one holds has 7 queries and 10 keys. More than half of its keys have a query, so it
    runs causally with 10 queries, and the results of the first 3 are dropped. With a prefix of 6 it has 4 queries,
    too few: it runs with a mask.
    """
    if window is not None:
        segments = segments.within(window)
    read = segments.keys - segments.unseen
    is_causal = is_whole & (2 * segments.queries > segments.keys)
    if window is not None:
        is_causal &= segments.keys <= window  # longer segments read no keys before the window
    return [
        _plan_batch(segments.at(members), causal)
        for causal, members in group_by_size(is_causal, segments.queries, read)
    ]


def _plan_batch(segments: Segments, is_causal: bool) -> list[np.ndarray]:
    """Plans the segments of one batch, with a mask or causally; then each key before the first query is a query, too,
    whose result is dropped."""
    if not is_causal:
        read = segments.keys - segments.unseen
        return plan_segments(segments.first, segments.queries, read, False, segments.key_indices)
    _, keys, real = plan_segments(segments.first, segments.keys, segments.keys, True, segments.key_indices)
    segment, position = np.divmod(real, keys.shape[1])
    return [keys, keys, real[position >= segments.prefix_length[segment]]]


def plan_attention(segments: Segments, is_whole: bool, window: int | None) -> HostPlan:
    """Plans a `SegmentPlan`; arguments as of `plan_segment_batches`."""
    plans = plan_segment_batches(segments, is_whole, window)
    restore = np.concatenate([queries.ravel()[real] for queries, _, real, *_ in plans]).argsort()

    def build(sent: list[Tensor]) -> SegmentPlan:
        rest = iter(sent[1:])
        batches = [SegmentBatch(window, *itertools.islice(rest, len(arrays))) for arrays in plans]
        return SegmentPlan(batches, sent[0])

    return [restore, *itertools.chain.from_iterable(plans)], build


# -- sliding windows -----------------------------------------------------------------------------------------------


def window_of(config) -> int | None:
    """Returns the number of tokens, itself included, that a token sees in layers with a window; None: no such layer."""
    return None if config.window_size is None else config.window_size[0] + 1


def kind_of_layer(config, layer_number: int) -> int:
    """Returns `FULL` or `WINDOW`; `layer_number` counts from 1 over the whole model."""
    return WINDOW if is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number) else FULL


def cut_segments(queries: np.ndarray, keys: np.ndarray, window: int) -> tuple[np.ndarray, ...]:
    """Cuts segments longer than the window, so that each piece reads at most about two windows of keys.

    Args:
        queries, keys: [n] numbers of queries, which are the last positions, and of keys.

    Returns:
        Arrays [m]: the segment of each piece, index of its first query in it, numbers of queries and keys as if the
        piece were a segment, and how many of the first keys no query sees.
    """
    step = -(-window // KEY_BLOCK) * KEY_BLOCK
    first, is_cut = keys - queries, keys > window
    counts = np.where(is_cut, (keys - 1) // step - first // step + 1, 1)
    segment, piece = expand_array_counts(counts)
    start = (first[segment] // step + piece) * step
    start = np.where(is_cut[segment], start.clip(min=first[segment]), first[segment])
    end = np.where(is_cut[segment], ((start // step) + 1) * step, keys[segment]).clip(max=keys[segment])
    unseen = (start + 1 - window).clip(min=0) // KEY_BLOCK * KEY_BLOCK
    return segment, start - first[segment], end - start, end, unseen


def drop_unseen(keys: Tensor, pages: Tensor, window: int, block: int) -> tuple[Tensor, Tensor]:
    """Drops the cache blocks that decodes do not see: keys [n] and pages [n, P] -> the same, without them.

    `block`: tokens of a cache block.
    """
    unseen = (keys - window).clamp(min=0) // KEY_BLOCK * KEY_BLOCK
    columns = (unseen // block).unsqueeze(1) + keys.new_ones(pages.shape[1]).cumsum(0) - 1
    return keys - unseen, pages.gather(1, columns.clamp(max=pages.shape[1] - 1))
