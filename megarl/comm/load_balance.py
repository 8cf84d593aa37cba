"""Assigns sequences to data-parallel replicas: round-robin for generation, balanced by FLOPs for other passes, and by
whole groups for roles that compare the responses to a prompt.

An assignment is an int64 [N] tensor: the dp rank of each sequence id. It depends only on lengths, mini-batches and the
number of replicas. So every rank can compute it, and roles with equally many replicas hold the same sequences.
"""

import heapq
from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from megarl.comm.microbatches import sequence_flops
from megarl.comm.role_mesh import RoleMesh
from megarl.groups import PromptGroups


def round_robin_assignment(mesh: RoleMesh, groups: PromptGroups) -> dict[str, Tensor]:
    """Round-robin assignment of groups, for every role."""
    return {name: groups.round_robin(len(role_groups.replicas)) for name, role_groups in mesh.roles.items()}


MIN_GROUPS_PER_REPLICA = 4  # groups of a mini-batch per replica that are assigned whole


def stay_whole(minibatch: int, replicas: int) -> bool:
    """Whether `balance_by_flops` keeps groups on one replica; `minibatch`: groups of the smallest mini-batch."""
    return minibatch >= MIN_GROUPS_PER_REPLICA * replicas


def balance_by_flops(
    lengths: Tensor, minibatches: list[Tensor], replicas: int, hidden: int, groups: PromptGroups | None = None
) -> Tensor:
    """An assignment that balances the FLOPs of every mini-batch over the replicas.

    Longest-processing-time rule: the most expensive sequence first, each to the replica with the least work in this
    mini-batch, then in the step so far. The largest load is at most 4/3 of the optimum (Graham 1969).

    Args:
        lengths: [N] tokens in each sequence of the step.
        minibatches: sequence ids of each mini-batch; together all of 0 … N − 1.
        hidden: hidden size, by which the work is estimated (`sequence_flops`).
        groups: of which every mini-batch consists, None: of single sequences. They stay on one replica, and so share
            their prompt, if there are at least `MIN_GROUPS_PER_REPLICA` for each; with fewer their work would differ.
    """
    flops = sequence_flops(lengths, hidden)
    if groups is not None:
        of_minibatches = [groups.of(ids).unique_consecutive() for ids in minibatches]
        if stay_whole(min(map(len, of_minibatches), default=0), replicas):
            return groups.expand(assign_by_cost(groups.reduce(flops, "sum"), of_minibatches, replicas))
    return assign_by_cost(flops, minibatches, replicas)


def assign_by_cost(costs: Tensor, minibatches: list[Tensor], replicas: int) -> Tensor:
    """[N] int64: the dp rank of each item, by the rule of `balance_by_flops`. `costs`: [N]."""
    flops, dp_assignment = costs.tolist(), [0] * len(costs)
    step_flops = [0] * replicas
    for ids in minibatches:
        heap = sorted((0, step_flops[dp_rank], dp_rank) for dp_rank in range(replicas))
        for sequence_id in sorted(ids.tolist(), key=lambda i: (-flops[i], i)):
            load, before, dp_rank = heap[0]
            heapq.heapreplace(heap, (load + flops[sequence_id], before, dp_rank))
            dp_assignment[sequence_id] = dp_rank
        for load, before, dp_rank in heap:
            step_flops[dp_rank] = before + load
    return torch.tensor(dp_assignment, dtype=torch.int64)


def balanced_assignment(
    mesh: RoleMesh,
    lengths: Tensor,
    generated_on: Tensor,
    minibatches: list[Tensor],
    hidden: int,
    groups: PromptGroups | None = None,
) -> dict[str, Tensor]:
    """Assignment for every role: as `generated_on` [N] for the rollout, balanced by FLOPs for the others. `lengths`:
    [N] tokens in each sequence; `groups`: as in `balance_by_flops`."""
    replicas = {name: len(role_groups.replicas) for name, role_groups in mesh.roles.items()}
    balanced = {n: balance_by_flops(lengths, minibatches, n, hidden, groups) for n in set(replicas.values())}
    return {name: balanced[n] for name, n in replicas.items()} | {"rollout": generated_on}


def with_whole_groups(
    dp_assignment: Tensor, lengths: Tensor, groups: PromptGroups, replicas: int, hidden: int
) -> Tensor:
    """An assignment in which no group is on two replicas, for a role that compares the responses to a prompt: that of
    `dp_assignment` [N] if it has none, so that roles on the same ranks go on to share their batch. Otherwise groups are
    assigned by their FLOPs, the most expensive first. `lengths`: [N] tokens in each sequence."""
    if torch.equal(groups.expand(dp_assignment[groups.starts]), dp_assignment):
        return dp_assignment
    flops = groups.reduce(sequence_flops(lengths, hidden), "sum")
    return groups.expand(assign_by_cost(flops, [torch.arange(len(flops))], replicas))


def positions_by_group(sequence_ids: Sequence[int], groups: PromptGroups) -> list[list[int]]:
    """Positions of the sequences of each group, given the ascending ids of what a replica holds. Some of a group may be
    missing: an episode whose environment failed has nothing to compare."""
    numbers = groups.of(torch.tensor(sequence_ids, dtype=torch.int64)).tolist()
    return [list(members) for _, members in groupby(range(len(numbers)), key=numbers.__getitem__)]
