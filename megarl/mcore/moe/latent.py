"""Experts that read and write latents instead of hidden states (Nemotron 3, `--moe-latent-size`).

A projection of the hidden states goes to the experts, and one of the sum of their results comes back; the router and
the shared expert read hidden states. Tokens travel to experts on other ranks as latents.
"""

import contextlib
import functools
from collections.abc import Iterator

from megatron.core.transformer.moe import moe_layer
from torch import Tensor

from megarl.mcore.kernels.linear import ReplicatedLinear


class LatentProjection(ReplicatedLinear):
    """One of the two projections; whole on every tensor-parallel rank."""

    def __init__(self, columns: int, rows: int, *, config, group, **_):
        """`group`: tensor-parallel ranks; the others are arguments of Transformer Engine's layer."""
        super().__init__(columns, rows, config, group)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """[T, 1, K] -> [T, 1, N], and no bias."""
        return super().forward(x), None


@contextlib.contextmanager
def own_projections(group) -> Iterator[None]:
    """Context in which Megatron's MoE layer is built with these projections: its own need Transformer Engine.

    `group`: tensor-parallel ranks.
    """
    of_megatron = moe_layer.HAVE_TE, moe_layer.TELinear
    moe_layer.HAVE_TE, moe_layer.TELinear = True, functools.partial(LatentProjection, group=group)
    try:
        yield
    finally:
        moe_layer.HAVE_TE, moe_layer.TELinear = of_megatron
