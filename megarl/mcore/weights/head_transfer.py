"""Copies the output layer of one model to the ranks of another, whose tensor-parallel ranks hold other rows of it."""

import contextlib
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.mcore import device
from megarl.mcore.parallel import fsdp
from megarl.mcore.weights.reshard import WeightTransfer
from megarl.mcore.weights.reshard_plan import Coordinates, GlobalTensor, ShardDescription, WeightShard

KEY = "output_layer"


class HeadRows(NamedTuple):
    """Some rows of an output layer [V, H] on this rank, in the form that `WeightTransfer` takes."""

    rows: Tensor | None  # [n, H]; None: this rank has none
    first: int = 0  # of them
    total: int = 0  # V

    def description(self) -> ShardDescription:
        """What this rank holds."""
        if self.rows is None or not len(self.rows):
            return ShardDescription({}, [])
        whole = GlobalTensor((self.total, self.rows.shape[1]), self.rows.dtype)
        return ShardDescription({KEY: whole}, [WeightShard(KEY, (), (self.first, 0), tuple(self.rows.shape))])

    def view(self, shard: WeightShard, offset: Coordinates | None = None, shape: Coordinates | None = None) -> Tensor:
        """A box of the rows, or all of them."""
        start, (count, width) = (self.first, 0) if offset is None else offset, shard.shape if shape is None else shape
        return self.rows[start[0] - self.first : start[0] - self.first + count, start[1] : start[1] + width]


def output_weight(model) -> Tensor | None:
    """A model's output weight [V/tp, H] on this rank, whether or not it is tied; None without the last stage."""
    last = list(model)[-1]
    last = last.module if hasattr(last, "module") else last
    if not last.post_process:
        return None
    # Megatron's method returns the embedding of a first stage also if the head has a weight of its own.
    is_tied = last.share_embeddings_and_output_weights
    return (last.shared_embedding_or_output_weight() if is_tied else last.output_layer.weight).detach()


class HeadCopy:
    """Rows of a frozen model's output layer [V_T, H_T] on the ranks of another model's last stage.

    `weight`: [V/tp, H_T] there, None elsewhere. Rows that the frozen model does not have are 0; they are beyond the
    vocabulary.
    """

    def __init__(self, frozen, policy, pg_collection, group, dtype: torch.dtype):
        """Plans the copy, and makes it. A collective of the group, which has the ranks of both.

        Args:
            frozen: the frozen model, of `dtype`, on this rank; None on others.
            policy: the other model, of the groups `pg_collection`, on this rank; None on others.
        """
        self._frozen, self.weight = frozen, None
        held, shapes = self._held(), [None] * dist.get_world_size(group)
        dist.all_gather_object(shapes, None if held.rows is None else (held.total, held.rows.shape[1]), group=group)
        total, width = next(shape for shape in shapes if shape is not None)
        own, wanted = None if policy is None else output_weight(policy), HeadRows(None)
        if own is not None:
            self.weight = torch.zeros(len(own), width, dtype=dtype, device=device.device())
            first = dist.get_rank(pg_collection.tp) * len(own)
            wanted = HeadRows(self.weight[: max(total - first, 0)], first, total)
        self._transfer = WeightTransfer(held, wanted, group)
        self.run()

    def run(self):
        """Copies the present weights. A collective of the group."""
        with contextlib.nullcontext() if self._frozen is None else self._frozen.offload.present("weights"):
            self._transfer.source = self._held()  # an offloaded weight is another tensor each time
            self._transfer.run()

    def _held(self) -> HeadRows:
        return HeadRows(None) if self._frozen is None else _rows_of(self._frozen)


def _rows_of(source) -> HeadRows:
    weight, tp = output_weight(source.model), source.role_groups.pg_collection.tp
    if weight is None:
        return HeadRows(None)
    first, count = dist.get_rank(tp) * len(weight), dist.get_world_size(tp) * len(weight)
    held = fsdp.rows_here(weight)
    return HeadRows(held.data, first + held.rows.start, count)
