"""Query groups of which tensor-parallel ranks share one, because there are fewer groups than ranks.

Megatron splits the rows of `linear_qkv` equally, so that heads are cut anywhere, and gathers all rows on every rank.
Here the s ranks of a group exchange the rows that each lacks: a rank needs its own R/s query heads, the key and the
value. Weights, gradients and checkpoints stay split; keys, values and their cache are equal on s ranks.
Shapes: T tokens, R query heads of a group (doubled with gates), D channels of a head, m = (R + 2)·D / s rows of a rank.
"""

import functools
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.mcore.kernels import with_gradient
from megarl.mcore.model.projections import HeadLayout


@functools.cache
def columns_between(heads: HeadLayout, ranks: int, sender: int, receiver: int) -> list[tuple[slice, slice]]:
    """What a rank of a group, from 0 to `ranks` − 1, has of what another needs, or of what it needs itself: columns of
    what the sender has, and of what the receiver gets."""
    kinds, channels = 1 + heads.has_gates, heads.channels  # queries, and perhaps gates after them
    own, of_kind = heads.queries // ranks * channels, heads.queries * channels
    rows = (kinds * of_kind + 2 * channels) // ranks
    wanted = [(kind * of_kind + receiver * own, own, kind * own) for kind in range(kinds)]
    first, found = sender * rows, []
    for start, count, place in (*wanted, (kinds * of_kind, 2 * channels, kinds * own)):
        low, high = max(start, first), min(start + count, first + rows)
        if low < high:
            shift = place - start
            found.append((slice(low - first, high - first), slice(low + shift, high + shift)))
    return found


def columns_sent(heads: HeadLayout, ranks: int) -> float:
    """Columns of a token that a rank sends to the others of its group, on average."""
    pairs = [(one, other) for one in range(ranks) for other in range(ranks) if one != other]
    return sum(_width(sent) for one, other in pairs for sent, _ in columns_between(heads, ranks, one, other)) / ranks


def _width(columns: slice) -> int:
    return columns.stop - columns.start


class SharedGroup:
    """One rank's place among the s ranks of a query group."""

    def __init__(self, heads: HeadLayout, group):
        """`group`: the tensor-parallel ranks, more than there are query groups."""
        size = dist.get_world_size(group)
        self.ranks = heads.ranks_of_group(size)
        self.number, place = divmod(dist.get_rank(group), self.ranks)  # of the query group; among its ranks
        self._group = group
        queries = heads.queries * (1 + heads.has_gates)
        self._rows = (queries + 2) * heads.channels // self.ranks
        self._width = (queries // self.ranks + 2) * heads.channels
        # Columns that are sent to, and come from, each tensor-parallel rank.
        self._sent: list[list[slice]] = [[] for _ in range(size)]
        self._received: list[list[slice]] = [[] for _ in range(size)]
        for other in range(self.ranks):
            rank = self.number * self.ranks + other
            self._sent[rank] = [sent for sent, _ in columns_between(heads, self.ranks, place, other)]
            self._received[rank] = [received for _, received in columns_between(heads, self.ranks, other, place)]

    def exchange(self, projected: Tensor) -> Tensor:
        """This rank's rows [T, 1, m] of `linear_qkv` -> [T, 1, (R/s + 2)·D]: its query heads, the key and the value."""
        return _exchange(projected, self)

    def to_heads(self, projected: Tensor) -> Tensor:
        """`exchange` of [T, m]."""
        heads = projected.new_empty(len(projected), self._width)
        for columns, part in self._swap(projected, self._sent, self._received):
            heads[:, columns] = part
        return heads

    def to_rows(self, heads: Tensor) -> Tensor:
        """Gradient of `to_heads`: [T, (R/s + 2)·D] -> [T, m], summed over the ranks in their order, in fp32."""
        projected = heads.new_zeros(len(heads), self._rows, dtype=torch.promote_types(heads.dtype, torch.float32))
        for columns, part in self._swap(heads, self._received, self._sent):
            projected[:, columns] += part
        return projected.to(heads.dtype)

    def _swap(self, x: Tensor, sent: list[list[slice]], received: list[list[slice]]) -> list[tuple[slice, Tensor]]:
        """Sends columns of x [T, …] to the ranks; returns where the columns belong that come from them, [T, n] each."""
        tokens, places = len(x), list(chain.from_iterable(received))
        message = torch.cat([x[:, columns].flatten() for columns in chain.from_iterable(sent)])
        taken, given = ([tokens * sum(map(_width, of_rank)) for of_rank in side] for side in (received, sent))
        arrived = x.new_empty(sum(taken))
        dist.all_to_all_single(arrived, message, taken, given, group=self._group)
        parts = arrived.split([tokens * _width(columns) for columns in places])
        return [(columns, part.view(tokens, -1)) for columns, part in zip(places, parts, strict=True)]


def _exchange_gradient(ctx, grad):
    return ctx.shared.to_rows(grad.squeeze(1)).unsqueeze(1), None


@with_gradient(_exchange_gradient)
def _exchange(ctx, projected, shared):
    """`SharedGroup.exchange`."""
    ctx.shared = shared
    return shared.to_heads(projected.squeeze(1)).unsqueeze(1)
