"""Attention over the paged cache in a step of the rollout engine: what all backends do alike.

Shapes: T tokens of the step, G key/value groups of R query heads each, D channels per head.
"""

import abc
import functools
import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor


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
        """Zeros for the outputs of all tokens."""
        return query.new_zeros(query.shape)

    @abc.abstractmethod
    def _decode(self, query: Tensor, cache: Tensor, reads, scale: float | None) -> Tensor:
        """[n, G, R, D] of decoded tokens -> [n, G, R, D]."""

    @abc.abstractmethod
    def _prefill(self, query: Tensor, cache: Tensor, reads: list, scale: float | None, result: Tensor):
        """Writes the results of prefills to their rows of `result` [T, G, R, D]."""
