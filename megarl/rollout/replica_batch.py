"""Batches of a replica's responses: chosen and cut; with the routes of all MoE layers, which its ranks
hold apart, and back."""

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.algorithms.packed import sums_by_sequence
from megarl.batch import Batch, expand_ranges
from megarl.comm.role_mesh import RoleGroups
from megarl.groups import PromptGroups


def forced_responses(batch: Batch) -> int:
    """How many responses have tokens of a thinking budget, in a batch in which no response has lost its mask."""
    if batch.forced is not None:  # with an environment, whose tokens are not in the mask either
        return int((sums_by_sequence(batch.forced.long(), batch.forced, batch.cu_seqlens) > 0).sum())
    return int((batch.response_lengths < batch.lengths - batch.prompt_lengths).sum())


def truncated_to(batch: Batch, longest: int, before: Tensor) -> Batch:
    """Truncates each response to `longest` new tokens, besides those [N] that it had before; a truncated response is
    not finished."""
    lengths = batch.lengths.minimum(batch.prompt_lengths + before + longest)
    every = torch.arange(len(batch), device=lengths.device)
    cut = batch.take(every, expand_ranges(batch.cu_seqlens[:-1], lengths))
    cut.lengths, cut.finished = lengths, batch.finished & (lengths == batch.lengths)
    return cut


def gather_layers(
    batch: Batch, layers: tuple[int, ...] | None, role_groups: RoleGroups
) -> tuple[Batch, list[int] | None] | None:
    """(this replica's batch on the host, numbers of the MoE layers of its routes) on its leader, None elsewhere.

    A collective of the replica.

    Args:
        layers: numbers of the MoE layers whose routes this rank has in `batch`; None: no routes are recorded.
    """
    shard, pg = None, role_groups.pg_collection
    if not dist.get_rank(pg.tp) and not dist.get_rank(pg.cp):  # others have the same
        batch = batch.to("cpu")
        shard = batch if role_groups.is_leader else Batch(routes=batch.routes), layers or ()
    shards = [shard] * len(role_groups.replica)
    if len(shards) > 1:
        gathered = shards if role_groups.is_leader else None
        dist.gather_object(shard, gathered, role_groups.replica[0], role_groups.replica_group)
    if not role_groups.is_leader:
        return None
    if layers is None:
        return batch, None
    shards = list(filter(None, shards))
    held = [layer for _, of_shard in shards for layer in of_shard]
    routes = torch.cat([of_shard.routes for of_shard, _ in shards], dim=1)
    batch.routes = routes[:, [held.index(layer) for layer in sorted(held)]]
    return batch, sorted(held)


def own_share(batch: Batch, groups: PromptGroups, role_groups: RoleGroups) -> Batch:
    """What this rank's replica takes of a batch: whole groups, round-robin. `groups`: of all replicas."""
    dp_assignment = groups.round_robin(len(role_groups.replicas))[batch.sequence_ids]
    return batch.select((dp_assignment == role_groups.dp_rank).nonzero().flatten())
