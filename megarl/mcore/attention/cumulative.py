"""Attention of a packed micro-batch for kernels that take segments by cumulative lengths: one call, no padding.

Segment i has queries cu_queries[i] … cu_queries[i + 1] − 1 of this rank's tokens, and keys cu_keys[i] …
cu_keys[i + 1] − 1 of the gathered ones. It may have fewer queries than keys (shared prefixes, context parallelism,
cached keys): the last query sees the last key, as in flash-attn from 2.1 on (bottom-right causal).
"""

import functools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megarl.mcore.attention.segments import HostPlan, Segments
from megarl.mcore.expand_counts import expand_array_counts


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
        return CumulativePlan(
            cu_queries=sent[0].int(),
            cu_keys=sent[1].int(),
            rows=sent[2] if len(sent) > 2 else None,
            max_queries=int(queries.max()),
            max_keys=int(keys.max()),
            window=window,
        )

    return HostPlan(lengths if rows is None else [*lengths, rows], build)
