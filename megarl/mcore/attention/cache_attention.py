"""Attention in a step of the rollout engine: over the paged cache, of keys and values or of latents.

Here is what all backends do alike. A step's rows may be rounded up to a bucket, and prompts that are equal within a
step are computed once.
Shapes: T tokens of the step, G key/value groups of R query heads each, D channels per head.
"""

import abc
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megarl.batch import expand_ranges
from megarl.mcore.kernels.batch_invariance import MIN_ROWS

# Rows that calls on a CUDA device are rounded up to; above, multiples of the last one. Few shapes mean few CUDA graphs,
# and memory that fits again.
BUCKETS = (4, 8, 16, 32, 64)


def bucket_of(rows: int, multiple: int = 1) -> int:
    """The least bucket of at least so many rows; a multiple of `multiple`, the ranks that split the rows."""
    last = BUCKETS[-1]
    size = -(-rows // last) * last if rows > last else next(bucket for bucket in BUCKETS if bucket >= rows)
    return -(-size // multiple) * multiple


def softmax_scale(channels: int, scale: float | None) -> float:
    """The factor of the scores: 1/√D unless the model has another one."""
    return 1 / math.sqrt(channels) if scale is None else scale


@dataclass(frozen=True)
class CacheReads:
    """The cache reads of a step, the same for all layers. What a kernel call reads is the backend's own type."""

    decodes: list[Any]  # calls for requests with one new token; `tokens`: indices of their tokens in the step
    prefills: list[Any]  # calls for others
    total: int  # T

    @functools.cached_property
    def only_decodes(self) -> bool:
        """Whether one call decodes all tokens of the step, in their order."""
        tokens = self.decodes[0].tokens if len(self.decodes) == 1 else None
        return isinstance(tokens, slice) and tokens == slice(0, self.total)


class StepRequests(NamedTuple):
    """The N requests whose new tokens are a step, one request after another; on the host, except the cache."""

    queries: Tensor  # [N] int64 new tokens of each
    keys: Tensor  # [N] int64 keys of each, including new ones: query i of q attends to keys 0 … k − q + i
    pages: Tensor  # [N, P] int64 blocks of each; any block of finite numbers after its last one
    total: int  # T; tokens after those of the requests are padding with zero results
    cache: Tensor  # [blocks, block, …] of any layer, for its device and dtype
    window: int | None = None  # keys that a query sees; None: all. The cache has all keys
    token_bytes: int | None = None  # of a token's keys and values when they are read; None: as many as in the cache

    def at(self, index: Tensor) -> "StepRequests":
        """Some of the requests."""
        return self._replace(queries=self.queries[index], keys=self.keys[index], pages=self.pages[index])

    def plan(self, decode: Callable[..., list], prefill: Callable[..., list]) -> CacheReads:
        """Calls both with (the first token of each request in the step, requests): those with one new token, others."""
        first, single = self.queries.cumsum(0) - self.queries, self.queries == 1
        if bool(single.all()):
            return CacheReads(decode(slice(0, len(first)), self), [], self.total)
        decodes, prompts = single.nonzero().flatten(), (~single).nonzero().flatten()
        decoding = decode(first[decodes], self.at(decodes)) if len(decodes) else []
        return CacheReads(decoding, prefill(first[prompts], self.at(prompts)), self.total)


class CacheAttention(abc.ABC):
    """Attention over the paged cache, by the kernels of a backend."""

    def __call__(self, query: Tensor, cache: Tensor, reads: CacheReads, scale: float | None = None, **options):
        """query [T, G, R, D] and a layer's cache [blocks, block, G, 2, D] with the new keys -> [T, G·R·D].

        `options`: of backends that compute more than others.
        """
        if reads.only_decodes:
            return self._decode(query, cache, reads.decodes[0], scale, **options).flatten(1)
        result = self._new_result(query, cache)
        for decodes in reads.decodes:
            result[decodes.tokens] = self._decode(query[decodes.tokens], cache, decodes, scale, **options)
        if reads.prefills:
            self._prefill(query, cache, reads.prefills, scale, result, **options)
        return result.flatten(1)

    def _new_result(self, query: Tensor, cache) -> Tensor:
        return query.new_zeros(query.shape)

    @abc.abstractmethod
    def _decode(self, query: Tensor, cache: Tensor, reads, scale: float | None) -> Tensor:
        """[n, G, R, D] of decoded tokens -> [n, G, R, D]."""

    @abc.abstractmethod
    def _prefill(self, query: Tensor, cache: Tensor, reads: list, scale: float | None, result: Tensor):
        """Writes the results of prefills to their rows of `result` [T, G, R, D]."""


# -- latents -------------------------------------------------------------------------------------------------------


class Latents(NamedTuple):
    """The cache of one layer with multi-latent attention (DeepSeek-V2, 2405.04434 §2.1).

    A token's row is its normed latent and the rotated key that all heads share: W numbers instead of keys and values of
    every head. Each step expands the rows that it reads into keys and values, with the products of training, so that
    rollout and training are equal to the last bit. Absorbed decoding, which multiplies queries and results by the
    expansion's weights instead, sums in another order; it is not implemented. G is the number of heads.
    """

    rows: Tensor  # [blocks, block, W]
    expand: Callable[[Tensor], tuple[Tensor, Tensor]]  # rows […, W] -> keys […, G, D] and values […, G, V]
    value_channels: int  # V; D unless the backend takes values of another size


def rows_of(cache: Tensor | Latents) -> Tensor:
    """What is cached of each token, [blocks, block, …]."""
    return cache.rows if isinstance(cache, Latents) else cache


# -- equal prompts -------------------------------------------------------------------------------------------------


class PrefillDedup(NamedTuple):
    """Deduplicated prefills of a step: equal prompts, such as those of a group's samples, are computed once.

    Unlike a shared prefix, which one sequence of a packed micro-batch holds for others, they are equal as a whole.
    """

    requests: Tensor  # [N'] int64 requests that are computed
    kept_tokens: Tensor  # [T'] int64 indices of their tokens and of padding
    inverse: Tensor  # [T] int64 index among the kept tokens of each token of the step


def deduplicate_prefills(tokens: Tensor, queries: Tensor, keys: Tensor) -> PrefillDedup | None:
    """Finds equal prompts; returns None if no two are equal, or if fewer than `MIN_ROWS` tokens would remain.

    Args:
        tokens: [T] new tokens of the step and its padding, on the host.
        queries, keys: [N] as in `StepRequests`; only requests without cached keys are compared.
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
