"""The rank set, its roles and their roles: who am I, who else is in my lane, and over which groups we talk.

A lane is the set of ranks that hold one replica of a role's model and one share of its batch (tensor, context and
pipeline ranks together). Every rank creates every role's groups in the same order, members or not.
"""

import itertools
import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from megarl.flags.role_flags import ROLES
from megarl.mcore import device
from megarl.mcore.config import megatron_flags
from megarl.mcore.parallel import process_groups

POLICY_PAIRS = (frozenset(("rollout", "actor")), frozenset(("rollout", "reference")))  # pairs of whole roles that talk


@dataclass(frozen=True)
class RoleGroups:
    """Where this rank stands in one role; `dp_rank` is None outside the role.

    `host` is the role under whose name time and memory are counted: itself, or the actor for a rollout on its module.
    """

    role: str
    ranks: range
    replicas: tuple[tuple[int, ...], ...]
    pg_collection: object | None
    replica_group: object | None
    rank: int
    model_role: str

    @property
    def is_member(self) -> bool:
        """Whether this rank works for the role."""
        return self.rank in self.ranks

    @property
    def dp_rank(self) -> int | None:
        """This rank's data-parallel lane."""
        return next((i for i, ranks in enumerate(self.replicas) if self.rank in ranks), None)

    @property
    def replica(self) -> tuple[int, ...]:
        """World ranks of this rank's replica, its leader first."""
        return self.replicas[self.dp_rank]

    @property
    def is_leader(self) -> bool:
        """Whether this rank speaks for its lane in exchanges and metrics."""
        return self.rank in self.leaders

    @property
    def leaders(self) -> tuple[int, ...]:
        """World rank of each lane's leader, in lane order."""
        return tuple(ranks[0] for ranks in self.replicas)

    def dp_all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        """Adds a tensor up over the role's data-parallel lanes; every member gets the sum."""
        dist.all_reduce(values, group=self.pg_collection.dp)
        return values


class RoleMesh:
    """All ranks of the program and every role's place, seen from this rank."""

    def __init__(self, roles: dict[str, RoleGroups], leaders: dict[frozenset, object], ranks: dict[frozenset, object]):
        self.roles = roles
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._leaders, self._ranks = leaders, ranks

    def __getitem__(self, role: str) -> RoleGroups:
        """The place of a role; of one that the run does not have, a place without ranks."""
        if role in self.roles or role not in ROLES:
            return self.roles[role]
        return RoleGroups(role, range(0), (), None, None, self.rank, role)

    def roles_of(self, rank: int) -> list[str]:
        """Roles that a rank works for; one that runs on another's module counts as that one."""
        return list(dict.fromkeys(place.model_role for place in self.roles.values() if rank in place.ranks))

    def leaders_group(self, one: str, other: str):
        """Group of the lane leaders of two roles, over which they exchange batches."""
        return self._leaders[frozenset((one, other))]

    def ranks_group(self, one: str, other: str):
        """Group of all ranks of the rollout and of a role with its policy: weights and routes go over it."""
        return self._ranks[frozenset((one, other))]

    def gather(self, item) -> list | None:
        """One object from each rank, on rank 0 (None elsewhere)."""
        items = [None] * self.size if self.rank == 0 else None
        dist.gather_object(item, items, dst=0)
        return items


def join_process_group(timeout: timedelta):
    """Joins the process group the launcher describes; alone, without a launcher, a world of one."""
    if dist.is_initialized():
        return
    if device.has_cuda():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if "RANK" in os.environ:
        dist.init_process_group(device.backend(), timeout=timeout)
    else:
        dist.init_process_group(device.backend(), store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)


def create_mesh(roles: dict, timeout: timedelta) -> RoleMesh:
    """Joins the process group and creates the groups of all roles (`{name: RoleSettings}`). Collective of the world."""
    join_process_group(timeout)
    cache, rank, all_groups = process_groups.GroupCache(timeout), dist.get_rank(), {}
    for name, role in roles.items():
        sizes = megatron_flags.parallel_sizes(role.megatron)
        pg_collection = process_groups.create_groups(role.ranks, sizes, cache)
        replicas = tuple(map(tuple, process_groups.replica_ranks(role.ranks, sizes)))
        replica_group = cache.mine(replicas)
        all_groups[name] = RoleGroups(name, role.ranks, replicas, pg_collection, replica_group, rank, role.model_role)
    leaders, ranks = {}, {}
    for one, other in itertools.combinations(all_groups, 2):
        pair = frozenset((one, other))
        leaders[pair] = cache.get(sorted({*all_groups[one].leaders, *all_groups[other].leaders}))
        if pair in POLICY_PAIRS:
            ranks[pair] = cache.get(sorted({*all_groups[one].ranks, *all_groups[other].ranks}))
    return RoleMesh(all_groups, leaders, ranks)
