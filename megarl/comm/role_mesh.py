"""The ranks of the program, the roles they belong to, and the process groups of each role.

Every rank creates the groups of all roles in the same order, also of roles that it does not belong to.
"""

import itertools
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megarl.cluster import cpu_cores, rendezvous
from megarl.flags.role_flags import ROLES
from megarl.mcore import device
from megarl.mcore.config import megatron_flags
from megarl.mcore.parallel import process_groups
from megarl.mcore.parallel.process_groups import all_reduce, all_reduce_max

# Time-out of collectives in a run with heartbeats, which know waiting from hanging.
NO_LIMIT = timedelta(days=3650)
# What flows between two roles apart from batches. Between disjoint roles each has a process group of its own, also if
# two have the same ranks: a group orders its collectives, and none may wait for what another direction has not sent.
CHANNELS = {
    "weights": ("actor", "rollout"),
    "reference": ("actor", "reference"),  # weights with which it is refreshed
    "scores": ("rollout", "reward"),  # of a round, before the batch is full
    "routes/actor": ("rollout", "actor"),
    "routes/reference": ("rollout", "reference"),
    "teacher": ("teacher", "actor"),  # its output layer
    "evaluation": ("rollout", "reward"),  # responses; a rollout that generates ahead has sent later batches by then
}
OF_LEADERS = {"evaluation"}  # channels of the replica leaders; the others are of all ranks


@dataclass(frozen=True)
class RoleGroups:
    """One role's ranks and process groups, seen from this rank. A replica is the set of ranks that hold one copy of the
    role's model and one data-parallel share of its batch: the tensor-, context- and pipeline-parallel ranks together.
    Its first rank is its leader: it represents the replica in exchanges with other roles and in metrics."""

    role: str
    ranks: range  # world ranks of the role
    replicas: tuple[tuple[int, ...], ...]  # world ranks of each replica, by dp rank
    pg_collection: Any  # Megatron's `ProcessGroupCollection`; None outside the role
    replica_group: dist.ProcessGroup | None  # process group of this rank's replica; None outside the role
    rank: int  # this rank
    model_role: str  # role that owns the model and counts its time and memory: `role`, or the actor if it shares one

    @property
    def is_member(self) -> bool:
        """Whether this rank belongs to the role."""
        return self.rank in self.ranks

    @property
    def dp_rank(self) -> int | None:
        """Number of this rank's replica; None outside the role."""
        return next((i for i, ranks in enumerate(self.replicas) if self.rank in ranks), None)

    @property
    def replica(self) -> tuple[int, ...]:
        """World ranks of this rank's replica, its leader first."""
        return self.replicas[self.dp_rank]

    @property
    def is_leader(self) -> bool:
        """Whether this rank is the leader of its replica."""
        return self.rank in self.leaders

    @property
    def leaders(self) -> tuple[int, ...]:
        """World rank of each replica's leader, by dp rank."""
        return tuple(ranks[0] for ranks in self.replicas)

    def dp_all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        """Sums a tensor over the role's replicas, in place."""
        return all_reduce(values, self.pg_collection.dp)

    def dp_max(self, values: torch.Tensor) -> torch.Tensor:
        """The largest of each number over the role's replicas, in place; NaN if a replica has NaN."""
        return all_reduce_max(values, self.pg_collection.dp)

    def gather_rows(self, rows: torch.Tensor, values: torch.Tensor, count: int) -> torch.Tensor:
        """[count, …] int64 on the host: the `values` of all replicas, each at its own `rows`; 0 at others. Called on
        all ranks of each replica, with the same values."""
        table = torch.zeros(count, *values.shape[1:], dtype=torch.int64, device=device.device())
        table[rows.to(table.device)] = values.to(table)
        return self.dp_all_reduce(table).cpu()

    def broadcast(self, values: torch.Tensor) -> torch.Tensor:
        """Copies the leader's tensor to all ranks of its replica, in place."""
        if len(self.replica) > 1:
            dist.broadcast(values, self.replica[0], group=self.replica_group)
        return values

    def broadcast_number(self, number: int) -> int:
        """The leader's number, on all ranks of its replica."""
        if len(self.replica) == 1:
            return number  # without a detour to the device
        return int(self.broadcast(torch.tensor([number], dtype=torch.int64, device=device.device())))

    def broadcast_object(self, item: Any) -> Any:
        """The leader's object, on all ranks of its replica."""
        items = [item]
        if len(self.replica) > 1:
            dist.broadcast_object_list(items, self.replica[0], group=self.replica_group)
        return items[0]

    def gather(self, item: Any) -> list:
        """One object of each rank of this rank's replica, its leader's first. A collective of the replica."""
        items = [item] * len(self.replica)
        if len(items) > 1:
            dist.all_gather_object(items, item, group=self.replica_group)
        return items

    def gather_replicas(self, item: Any) -> list:
        """One object of each replica, by dp rank. A collective of the leaders."""
        items = [item] * len(self.replicas)
        if len(items) > 1:
            dist.all_gather_object(items, item, group=self.pg_collection.dp)
        return items


class RoleMesh:
    """All ranks of the program and the groups of all roles, seen from this rank."""

    def __init__(self, roles: dict[str, RoleGroups], leaders: dict[frozenset, object], channels: dict[str, object]):
        """`leaders`: groups of the replica leaders of pairs of roles; `channels`: groups of `CHANNELS` by name."""
        self.roles = roles
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._leaders, self._channels = leaders, channels

    def __getitem__(self, role: str) -> RoleGroups:
        """The groups of a role; without ranks if the run does not have the role."""
        if role in self.roles or role not in ROLES:
            return self.roles[role]
        return RoleGroups(role, range(0), (), None, None, self.rank, model_role=role)

    def roles_of(self, rank: int) -> list[str]:
        """Roles that own a model on a rank; a role that runs on the model of another counts as the other."""
        return list(dict.fromkeys(g.model_role for g in self.roles.values() if rank in g.ranks))

    def leaders_group(self, one: str, other: str, in_evaluation: bool = False):
        """Group of the replica leaders of two roles, over which batches are exchanged."""
        return self.channel("evaluation") if in_evaluation else self._leaders[frozenset((one, other))]

    def channel(self, name: str):
        """Group of one of the `CHANNELS`."""
        return self._channels[name]

    def gather(self, item) -> list | None:
        """One object from each rank, on rank 0; None elsewhere. Collective."""
        items = [None] * self.size if self.rank == 0 else None
        dist.gather_object(item, items, dst=0)
        return items


def meet(timeout: timedelta) -> tuple[dist.Store, int, int]:
    """The ranks' store, this rank, and their number, from the launcher's environment; without one a world of one."""
    if "RANK" not in os.environ:
        return dist.HashStore(), 0, 1
    store, rank, size = dist.HashStore(), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    rendezvous.choose_interface()
    if "MASTER_PORT" in os.environ:
        store, rank, size = next(dist.rendezvous("env://", timeout=timeout))
    elif size != 1:
        store = rendezvous.meet(os.environ, timeout)
    # torchrun keeps its store when it starts the ranks again: they would connect to addresses of dead ones.
    return dist.PrefixStore(f"megarl/start {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store), rank, size


def join_process_group(timeout: timedelta, collective_timeout: timedelta | None = None):
    """Initializes torch.distributed from the launcher's environment; without a launcher, with a world of one rank.
    `timeout`: of the ranks' first meeting. `collective_timeout`: of collectives and, after the meeting, of waits in the
    store; default: `timeout`."""
    if dist.is_initialized():
        return
    if device.has_cuda():
        # Slurm may show each task only its own device.
        index = int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count()
        cpu_cores.bind_to_device(index)  # before the context and all host memory
        torch.cuda.set_device(index)
    store, rank, size = meet(timeout)
    store.set_timeout(timeout)
    limit = collective_timeout or timeout
    # Without `device_id`: with it, every group would be split from the world's communicator by all ranks, members or
    # not, and a role on 1,024 ranks has more than 1,700 groups. Without it, communicators of groups that are used are
    # created at their first collective, by their members, on the device that is set above.
    dist.init_process_group(device.backend(), store=store, rank=rank, world_size=size, timeout=limit)
    # The first ranks of a group that communicate wait in the store for the others, who may still be generating.
    store.set_timeout(limit)


def create_mesh(roles: dict, timeout: timedelta) -> RoleMesh:
    """Initializes torch.distributed and creates the groups of all roles ({name: `RoleSettings`}). Collective.
    `timeout`: of collectives."""
    join_process_group(timeout)
    cache, rank = process_groups.GroupCache(timeout), dist.get_rank()
    all_groups = {}
    for name, role in roles.items():
        sizes = megatron_flags.parallel_sizes(role.megatron)
        pg_collection = process_groups.create_groups(role.ranks, sizes, cache)
        replicas = tuple(map(tuple, process_groups.replica_ranks(role.ranks, sizes)))
        mine = cache.mine(replicas)
        all_groups[name] = RoleGroups(name, role.ranks, replicas, pg_collection, mine, rank, role.model_role)
    leaders = {}
    for one, other in itertools.combinations(all_groups, 2):
        pair = frozenset((one, other))
        leaders[pair] = cache.get(sorted({*all_groups[one].leaders, *all_groups[other].leaders}))
    channels: dict[str, object] = {}
    for name, ends in CHANNELS.items():
        if all(role in all_groups for role in ends):
            one, other = (all_groups[role] for role in ends)
            members = (one.leaders, other.leaders) if name in OF_LEADERS else (one.ranks, other.ranks)
            ranks = sorted({*members[0], *members[1]})
            shares = not set(one.ranks).isdisjoint(other.ranks)
            channels[name] = cache.get(ranks) if shares else dist.new_group(ranks, timeout=timeout)
    return RoleMesh(all_groups, leaders, channels)
