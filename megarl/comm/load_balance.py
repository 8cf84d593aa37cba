"""Which lane holds which sequence: dealt in turn for writing, by work for everything that runs a model over the text.

Owners are an int64 [N] tensor of lanes by sequence id. They follow from lengths, mini-batches and the number of lanes
alone, so every rank knows them, and roles with the same lanes hold the same sequences.
"""

import heapq

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.batch import Batch, round_robin
from megarl.comm.microbatches import sequence_flops
from megarl.comm.role_mesh import RoleMesh
from megarl.mcore import device


def round_robin_assignment(mesh: RoleMesh, count: int, samples_per_prompt: int) -> dict[str, Tensor]:
    """Owners for every role when all deal the prompts of `count` sequences in turn."""
    ids = torch.arange(count)
    return {name: round_robin(ids, len(place.replicas), samples_per_prompt) for name, place in mesh.roles.items()}


def balance_by_flops(lengths: Tensor, minibatches: list[Tensor], replicas: int, hidden: int) -> Tensor:
    """Owners that share the work of each mini-batch out evenly.

    Dearest sequence first, each to the lane with the least work in its mini-batch, then in the step so far: at most
    4/3 of the best possible largest share (Graham 1969).

    Args:
        lengths: [N] tokens of each sequence of the step.
        minibatches: sequence ids of each mini-batch; together all of 0 … N − 1.
        hidden: hidden size by which the work is reckoned (`workloads`).
    """
    costs, dp_assignment, so_far = sequence_flops(lengths, hidden).tolist(), [0] * len(lengths), [0] * replicas
    for ids in minibatches:
        heap = sorted((0, so_far[dp_rank], dp_rank) for dp_rank in range(replicas))
        for number in sorted(ids.tolist(), key=lambda i: (-costs[i], i)):
            work, before, dp_rank = heap[0]
            heapq.heapreplace(heap, (work + costs[number], before, dp_rank))
            dp_assignment[number] = dp_rank
        for work, before, dp_rank in heap:
            so_far[dp_rank] = before + work
    return torch.tensor(dp_assignment, dtype=torch.int64)


def balanced_assignment(
    mesh: RoleMesh, lengths: Tensor, written: Tensor, minibatches: list[Tensor], hidden: int
) -> dict[str, Tensor]:
    """Owners for every role: those who wrote it for the rollout, by work for the others.

    Args:
        lengths: [N] tokens of each sequence, known to every rank (`lengths_of`).
        written: [N] lane of the rollout that holds each sequence.
    """
    found = {
        n: balance_by_flops(lengths, minibatches, n, hidden) for n in {len(p.replicas) for p in mesh.roles.values()}
    }
    dp_assignment = {name: found[len(place.replicas)] for name, place in mesh.roles.items()}
    return dp_assignment | {"rollout": written}


def gather_lengths(mesh: RoleMesh, rollout: Batch | None, count: int, group=None) -> Tensor:
    """[N] int64 tokens of each of `count` sequences, from this rank's share of the rollout (None where it has none).

    A collective of the group: the world, or one that all ranks of the rollout are in.
    """
    lengths = torch.zeros(count, dtype=torch.int64, device=device.device())
    if mesh["rollout"].is_leader:
        lengths[rollout.sequence_ids] = rollout.lengths
    dist.all_reduce(lengths, group=group)
    return lengths
