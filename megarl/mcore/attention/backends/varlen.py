"""`--attention-backend varlen`: flash attention of packed sequences, and paged decode in one launch. For CUDA, 16 bits.

Training and prefills: one call of flash-attn, else of `torch.nn.attention.varlen`; decode steps: a kernel of megarl's
(`kernels.cuda.segment_attention`). Segment i has queries cu_queries[i] … cu_queries[i + 1] − 1 of this rank's tokens,
and keys cu_keys[i] … cu_keys[i + 1] − 1 of the gathered ones. It may have fewer queries than keys: the last query sees
the last key, as in flash-attn from 2.1 on. Shapes: as in `sdpa`.
"""

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from megarl.batch import expand_array_counts
from megarl.mcore import device
from megarl.mcore.attention.cache_attention import CacheAttention, CacheReads, StepRequests, bucket_of, softmax_scale
from megarl.mcore.attention.segments import HostPlan, Segments

Kernel = Callable[..., Tensor]
TOKENS, KEYS = 64, 256  # a call for prompts has multiples of them


@dataclass(frozen=True)
class CumulativePlan:
    """The n segments of one call, the same in all layers."""

    cu_queries: Tensor  # [n + 1] int32, from 0
    cu_keys: Tensor  # [n + 1] int32, from 0
    rows: Tensor | None  # [keys] int64 rows of the stream, or of the cache, that are keys; None: the whole stream
    max_queries: int
    max_keys: int
    window: int | None  # keys that a query sees, the last ones; None: all

    @property
    def lengths(self) -> tuple[Tensor, Tensor, int, int]:
        """Cumulative lengths and the longest ones, as kernels take them."""
        return self.cu_queries, self.cu_keys, self.max_queries, self.max_keys

    @property
    def window_size(self) -> tuple[int, int]:
        """Keys to the left and to the right of a query that it sees; −1: all."""
        return (-1 if self.window is None else self.window - 1), 0

    @functools.cached_property
    def segments(self) -> Tensor:
        """[4, n] int32: first query, queries, keys, and first key of each segment."""
        queries, keys = self.cu_queries, self.cu_keys
        return torch.stack([queries[:-1], queries.diff(), keys.diff(), keys[:-1]])


def plan_attention(segments: Segments, is_whole: bool, window: int | None) -> HostPlan:
    """Plans a `CumulativePlan`.

    Args:
        segments: whose queries are this rank's tokens, one segment after another.
        is_whole: this rank holds the whole stream, so that queries have the indices of keys.
        window: keys that a query sees; None: all.
    """
    rows = None
    if not is_whole or segments.prefix_length.any():
        segment, position = expand_array_counts(segments.keys)
        rows = segments.at(segment).key_indices(position[:, None])[:, 0]
    return plan_segments(segments.queries, segments.keys, rows, window)


def plan_segments(queries: np.ndarray, keys: np.ndarray, rows: np.ndarray | None, window: int | None) -> HostPlan:
    """Plans a `CumulativePlan` of n segments with so many queries and keys; `rows`, `window`: its fields."""
    lengths = [np.append(0, each.cumsum()) for each in (queries, keys)]

    def build(sent: list[Tensor]) -> CumulativePlan:
        gathered = sent[2] if len(sent) > 2 else None
        return CumulativePlan(sent[0].int(), sent[1].int(), gathered, int(queries.max()), int(keys.max()), window)

    return lengths if rows is None else [*lengths, rows], build


@functools.cache
def flash_kernel() -> Kernel:
    """Attention `(query, key, value, plan, scale)` [T, H, D] of the segments of a `CumulativePlan`."""
    if importlib.util.find_spec("flash_attn") is not None:
        return _of_flash_attn(importlib.import_module("flash_attn").flash_attn_varlen_func)
    return _of_torch(importlib.import_module("torch.nn.attention.varlen").varlen_attn)


def _of_flash_attn(function: Callable) -> Kernel:
    def attend(query, key, value, plan: CumulativePlan, scale: float) -> Tensor:
        options = {"deterministic": torch.are_deterministic_algorithms_enabled(), "window_size": plan.window_size}
        return function(query, key, value, *plan.lengths, softmax_scale=scale, causal=True, **options)

    return attend


def _of_torch(function: Callable) -> Kernel:
    parameters = inspect.signature(function).parameters
    # One part of the keys at a time: a token's result then does not depend on what else is in the call. It also keeps
    # torch from cuDNN, which makes a plan for every new shape.
    options = {name: value for name, value in (("enable_gqa", True), ("num_splits", 1)) if name in parameters}

    def attend(query, key, value, plan: CumulativePlan, scale: float) -> Tensor:
        if "enable_gqa" not in options:
            key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
        return function(query, key, value, *plan.lengths, scale=scale, window_size=plan.window_size, **options)

    return attend


def packed_attention(query: Tensor, key: Tensor, value: Tensor, plan: CumulativePlan, scale: float | None) -> Tensor:
    """As that of `sdpa`. Gradients of keys that several segments read are added in a fixed order."""
    if plan.rows is not None:
        key, value = key[plan.rows], value[plan.rows]
    return flash_kernel()(query, key, value, plan, softmax_scale(query.shape[-1], scale))


class DecodeTable(NamedTuple):
    """The decodes of a step, and rows of padding that read nothing."""

    tokens: slice | Tensor  # [n] indices of their tokens in the step, without padding
    pages: Tensor  # [n', P] int32 cache blocks
    lengths: Tensor  # [n'] int32 keys that each token sees
    window: int | None
    arrived: Tensor  # [n'·G] of a layer: int32 zeros between the calls of `paged_decode`


def plan_cache_reads(requests: StepRequests) -> CacheReads:
    """As that of `sdpa`; the prompts of a step are int64 indices of their tokens in it and a plan."""
    queries, keys, pages, total, cache, window, _ = requests
    first, is_decode = queries.cumsum(0) - queries, queries == 1
    decodes, prompts = is_decode.nonzero().flatten(), (~is_decode).nonzero().flatten()
    arrays, build = [first[decodes].numpy(), *_padded(keys[decodes], pages[decodes])], None
    if len(prompts):
        counts, lengths, blocks = (x[prompts].numpy() for x in (queries, keys, pages))
        packed, build = _plan_prompts(counts, lengths, blocks, cache.shape[1], window)
        segment, position = expand_array_counts(counts)
        arrays += [first[prompts].numpy()[segment] + position, *packed]
    tokens, lengths, table, *sent = device.to_device(arrays)
    own = tokens if len(tokens) < total else slice(0, total)
    arrived = torch.zeros(len(lengths) * cache.shape[2], dtype=torch.int32, device=lengths.device)
    decoding = [DecodeTable(own, table.int(), lengths.int(), window, arrived)] if len(decodes) else []
    return CacheReads(decoding, [(sent[0], build(sent[1:]))] if build else [], total)


def _padded(keys: Tensor, pages: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Keys [n] and pages [n, P] of decodes with rows of padding after them, up to a bucket."""
    padding = bucket_of(len(keys)) - len(keys)
    return np.pad(keys.numpy(), (0, padding)), np.pad(pages.numpy(), ((0, padding), (0, 0)))


def _plan_prompts(queries: np.ndarray, keys: np.ndarray, pages: np.ndarray, block: int, window: int | None) -> HostPlan:
    """Plans a `CumulativePlan` of prompts: queries and keys [n] of each, its pages [n, P].

    A segment of padding after them, which reads the cache's first rows, rounds up the sizes of the call.
    """
    segment, position = expand_array_counts(keys)
    rows = pages[segment, position // block] * block + position % block
    padding = TOKENS - queries.sum() % TOKENS
    unread = padding + -(len(rows) + padding) % KEYS
    queries, keys = np.append(queries, padding), np.append(keys, unread)
    return plan_segments(queries, keys, np.pad(rows, (0, unread)), window)


def reads_of_table(blocks: Tensor, lengths: Tensor, window: int | None, arrived: Tensor) -> CacheReads:
    """The reads of a decode step on the device: blocks [B, P] int32 and keys [B] int32 of each row; `arrived`: as of
    `DecodeTable`, for [B·G]."""
    return CacheReads([DecodeTable(slice(0, len(lengths)), blocks, lengths, window, arrived)], [], len(lengths))


def _filled(rows: Tensor, count: int) -> Tensor:
    return pad(rows, (0, 0) * (rows.dim() - 1) + (0, count - len(rows))) if count > len(rows) else rows


def _attend_cache(query: Tensor, cache: Tensor, plan: CumulativePlan, scale: float) -> Tensor:
    key, value = cache.flatten(0, 1)[plan.rows].unbind(2)
    return flash_kernel()(query, key, value, plan, scale)


class VarlenPagedAttention(CacheAttention):
    """Attention over the paged cache."""

    def __init__(self, attend: Callable[..., Tensor] = _attend_cache, in_parts: bool = True):
        """`attend`: of prompts, (query [T, G·R, D], cache, plan, scale) -> [T, G·R, D]; `in_parts`: whether decodes
        divide long requests' keys into parts."""
        self._attend, self._in_parts = attend, in_parts

    def _prefill(
        self, query, cache: Tensor, reads: list[tuple[Tensor, CumulativePlan]], scale: float | None, result: Tensor
    ):
        for places, plan in reads:
            own = _filled(query[places], len(places) // TOKENS * TOKENS + TOKENS).flatten(1, 2)
            out = self._attend(own, cache, plan, softmax_scale(query.shape[-1], scale))
            result[places] = out[: len(places)].view(-1, *query.shape[1:])

    def _decode(self, query: Tensor, cache: Tensor, reads: DecodeTable, scale: float | None) -> Tensor:
        from megarl.mcore.kernels.cuda.segment_attention import paged_decode  # needs Triton

        own, scale = _filled(query, len(reads.lengths)), softmax_scale(query.shape[-1], scale)
        arrived, counts = reads.arrived, len(own) * cache.shape[2]
        if len(arrived) < counts:  # layers of some models of transformers have more groups than others
            arrived = arrived.new_zeros(counts)
        arrived = arrived if self._in_parts else None
        out = paged_decode(own, cache, reads.pages, reads.lengths, scale, window=reads.window, arrived=arrived)
        return out[: len(query)]


PagedAttention = VarlenPagedAttention  # the name of a backend's
