"""Process groups of one role: a `ProcessGroupCollection` on a range of ranks, without Megatron's global state.

Group creation is collective over the world: every rank, member or not, calls `create_groups` for every role in the
same order. Groups of the same ranks are created once and shared, within a role and between colocated roles. Inside
`fake_world(4096)` this process is one rank of 4,096: it creates its groups with the same code as a real run, and
collectives send nothing. The collectives here cost nothing where a group has one rank.
"""

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from megarl.mcore import device

# Attribute of the ProcessGroupCollection -> dimensions of the dense grid (tp fastest, pp slowest: Megatron's order).
DENSE = {name: [name] for name in ("tp", "cp", "dp", "pp")} | {
    "mp": ["tp", "pp"],
    "tp_cp": ["tp", "cp"],
    "dp_cp": ["cp", "dp"],
    "tp_dp_cp": ["tp", "cp", "dp"],
    "intra_dp_cp": ["cp", "dp"],
    "intra_dist_opt": ["tp", "cp", "dp", "pp"],
}
EXPERT = {name: [name] for name in ("expt_tp", "ep", "expt_dp")} | {
    "intra_expt_dp": ["expt_dp"],
    "tp_ep": ["expt_tp", "ep"],
    "tp_ep_pp": ["expt_tp", "ep", "pp"],
}


@dataclass(frozen=True)
class ParallelSizes:
    """Sizes of a role's parallel dimensions. The data-parallel size follows from the number of ranks."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1

    def replica_size(self) -> int:
        """Returns the number of ranks of one data-parallel replica."""
        return self.tensor * self.pipeline * self.context

    def data(self, ranks: int) -> int:
        """Returns the number of data-parallel replicas on that many ranks."""
        return ranks // self.replica_size()

    def expert_data(self, ranks: int) -> int:
        """Returns the number of data-parallel replicas of each expert on that many ranks."""
        return ranks // (self.expert_tensor * self.expert * self.pipeline)


class GroupCache:
    """Caches this process's groups by their ranks. Every rank must request groups in the same order."""

    def __init__(self, timeout: timedelta | None = None):
        self._groups = {}
        self._timeout = timeout

    def get(self, ranks: list[int]):
        """Returns the group of these world ranks; creates it on the first request (collective over the world)."""
        key = tuple(ranks)
        if key not in self._groups:
            self._groups[key] = dist.new_group(list(ranks), timeout=self._timeout)
        return self._groups[key]

    def mine(self, enumeration: Iterable[Sequence[int]]):
        """Creates every group of a dimension and returns the one with this rank, or None."""
        groups = [(ranks, self.get(list(ranks))) for ranks in enumeration]
        return next((group for ranks, group in groups if dist.get_rank() in ranks), None)


def _grid(ranks: range, sizes: ParallelSizes) -> HyperCommGrid:
    shape = [sizes.tensor, sizes.context, sizes.data(len(ranks)), sizes.pipeline]
    grid = HyperCommGrid(shape, ["tp", "cp", "dp", "pp"], rank_offset=ranks.start)
    expert = [sizes.expert_tensor, sizes.expert, sizes.expert_data(len(ranks)), sizes.pipeline]
    grid.register_view("expert", expert, ["expt_tp", "ep", "expt_dp", "pp"], shared_dims=["pp"])
    return grid


def replica_ranks(ranks: range, sizes: ParallelSizes) -> list[list[int]]:
    """Returns the world ranks of each data-parallel replica by dp rank; the first holds the first pipeline stage."""
    width = sizes.tensor * sizes.context
    data = sizes.data(len(ranks))
    return [
        [ranks.start + (stage * data + dp_rank) * width + i for stage in range(sizes.pipeline) for i in range(width)]
        for dp_rank in range(data)
    ]


def create_groups(ranks: range, sizes: ParallelSizes, cache: GroupCache) -> ProcessGroupCollection | None:
    """Creates all groups of a role; returns them on members and None elsewhere. Collective over the world. The
    position-embedding group has only the first stage: with the last stage in it `finalize_model_grads` fails."""
    grid = _grid(ranks, sizes)
    pg_collection = ProcessGroupCollection()
    for name, dims in DENSE.items():
        setattr(pg_collection, name, cache.mine(grid.get_rank_enum(dims)))
    for name, dims in EXPERT.items():
        setattr(pg_collection, name, cache.mine(grid.get_rank_enum(dims, view="expert")))
    stages = grid.get_rank_enum(["pp"])
    pg_collection.embd = cache.mine([list(dict.fromkeys((s[0], s[-1]))) for s in stages])
    pg_collection.pos_embd = cache.mine([[s[0]] for s in stages])
    pg_collection.inter_dist_opt = None
    # Where Transformer Engine's experts are replicated: one of these ranks saves them. Weights are not split further.
    pg_collection.expt_dp_gtp_remat = pg_collection.expt_dp
    return pg_collection if dist.get_rank() in ranks else None


@contextlib.contextmanager
def fake_world(size: int, rank: int = 0):
    """Makes this process `rank` of a world of `size` ranks, without other processes, through torch's fake backend.
    RuntimeError if torch.distributed is initialized."""
    if dist.is_initialized():
        raise RuntimeError("torch.distributed is initialized already: start a fake world only in a process without one")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def all_reduce(values: Tensor, group, op=dist.ReduceOp.SUM) -> Tensor:
    """Reduces a tensor over the ranks of a group, in place, and returns it. A rank alone calls nothing: gloo would hand
    the tensor to a thread and wait for it, which takes as long as several small operators."""
    if dist.get_world_size(group) > 1:
        dist.all_reduce(values, op=op, group=group)
    return values


def all_reduce_max(values: Tensor, group) -> Tensor:
    """The largest of each number over the ranks of a group, in place; NaN if a rank has NaN. gloo keeps a NaN of the
    first rank alone: of the others a comparison, which is false, takes the other number."""
    if dist.get_world_size(group) == 1 or not values.is_floating_point():
        return all_reduce(values, group, dist.ReduceOp.MAX)
    is_nan = values.isnan()
    both = torch.stack([values.masked_fill(is_nan, -torch.inf), is_nan.to(values.dtype)])
    largest, has_nan = all_reduce(both, group, dist.ReduceOp.MAX)
    return values.copy_(largest.masked_fill(has_nan > 0, torch.nan))


def all_reduce_number(value: int, group, op=dist.ReduceOp.SUM) -> int:
    """Reduces a number over the ranks of a group, and waits for the result."""
    if dist.get_world_size(group) == 1:
        return value
    return int(all_reduce(torch.tensor([value], dtype=torch.int64, device=device.device()), group, op))


def split_state_dict(module, prefix: str = "", sharded_offsets=(), metadata=None) -> dict:
    """A module's `sharded_state_dict`: weights that Megatron's mark calls split are split over its `tp_group`."""
    state = module.state_dict(prefix="", keep_vars=True)
    axes = {name: each.partition_dim for name, each in state.items() if getattr(each, "tensor_model_parallel", False)}
    return make_sharded_tensors_for_checkpoint(
        state, prefix, axes, sharded_offsets, tp_group=module.tp_group, dp_cp_group=metadata["dp_cp_group"]
    )
