"""Attention over a paged cache of latents, for multi-latent attention (DeepSeek-V2, 2405.04434 §2.1).

A token's row of the cache is its normed latent and the rotated key that all heads share: W numbers instead of keys and
values of every head. Each step expands the rows that it reads into keys and values, with the products of training, so
that rollout and training are equal to the last bit. Absorbed decoding, which multiplies queries and results by the
expansion's weights instead, sums in another order; it is not implemented.
Shapes: as in `backends.sdpa`; G is the number of heads.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from megarl.mcore.attention.cache_attention import CacheAttention


class Latents(NamedTuple):
    """The cache of one layer."""

    rows: Tensor  # [blocks, block, W]
    expand: Callable[[Tensor], tuple[Tensor, Tensor]]  # rows […, W] -> keys […, G, D] and values […, G, V]
    value_channels: int  # V; D unless the backend takes values of another size


class _Expanding:
    """A `PagedAttention` of any backend that reads `Latents`."""

    def _gather_pages(self, cache: Latents, pages: Tensor, width: int, count: int) -> tuple[Tensor, Tensor]:
        """Returns keys and values [n, G, K, D] of the first K rows of pages [n·P]."""
        return _by_head(cache.expand(self._page_rows(cache.rows, pages, width, count)))

    def _gather_keys(self, cache: Latents, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Returns keys and values [n, G, K, D] of rows [n, K] of the flattened cache."""
        rows = cache.rows.flatten(0, 1).index_select(0, keys.flatten()).unflatten(0, keys.shape)
        return _by_head(cache.expand(rows))


def _by_head(expanded: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    key, value = expanded
    return key.transpose(1, 2), value.transpose(1, 2)


def latent_attention(backend) -> CacheAttention:
    """Returns the attention of a backend's module over `Latents`: its own, or the one over keys and values, changed."""
    if hasattr(backend, "LatentAttention"):
        return backend.LatentAttention()
    return type("LatentAttention", (_Expanding, backend.PagedAttention), {})()
