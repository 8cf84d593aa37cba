"""Moves packed batches between roles by collectives: owner to owner, one contiguous buffer, never through rank 0.

All fields of all sequences for one destination lane go into one byte buffer; one all-to-all for sizes, one for
payload, over the lane leaders of the two roles; then a broadcast inside the destination lane where it has more than
one rank. Roles whose lanes hold the same sequences on the same ranks hand the batch over without a copy. A rank that
only gives need not wait until it is taken.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.batch import FIELDS, Batch, concatenate, empty_batch
from megarl.comm.role_mesh import RoleGroups, RoleMesh
from megarl.mcore import device

HEADER = ["sequence_ids", "lengths"]  # always sent: they say what the other fields belong to


def _in_wire_order(names: list[str]) -> list[str]:
    """Header first, then wide dtypes before narrow ones, so that every field starts aligned."""
    rest = sorted((n for n in names if n not in HEADER), key=lambda n: -FIELDS[n].dtype.itemsize)
    return HEADER + rest


def to_bytes(batch: Batch, names: list[str]) -> Tensor:
    """The batch's fields as one uint8 tensor: [count] int64, header, fields; padded to a multiple of 8 bytes."""
    count = torch.tensor([len(batch)], dtype=torch.int64, device=batch.lengths.device)
    parts = [count.view(torch.uint8)]
    parts += [getattr(batch, name).contiguous().view(torch.uint8) for name in _in_wire_order(names)]
    size = sum(len(part) for part in parts)
    parts.append(torch.zeros(-size % 8, dtype=torch.uint8, device=count.device))
    return torch.cat(parts)


def from_bytes(buffer: Tensor, names: list[str]) -> Batch:
    """The batch that `to_bytes` wrote."""
    count, position, fields, total = int(buffer[:8].view(torch.int64)), 8, {}, None
    for name in _in_wire_order(names):
        spec = FIELDS[name]
        items = count if spec.kind == "sequence" else total
        size = items * spec.dtype.itemsize
        fields[name] = buffer[position : position + size].view(spec.dtype)
        position += size
        if name == "lengths":
            total = int(fields[name].sum())
    return Batch(**fields)


class PendingSends:
    """What this rank gave and was not taken yet: its buffers stay until `wait`."""

    def __init__(self):
        self._held: list[tuple] = []

    def hold(self, work: dist.Work, *buffers: Tensor):
        """Keeps a collective that was started, and its memory."""
        self._held.append((work, buffers))

    def wait(self):
        """Returns when all was taken."""
        for work, _ in self._held:
            work.wait()
        self._held.clear()


def _all_to_all(parts: list[Tensor], group, pending: PendingSends | None) -> list[Tensor]:
    """Sends parts[i] to the i-th rank of the group; returns what each rank of the group sent here.

    With `pending`, to which it is left to wait, nothing comes: this rank need not even know that.
    """
    counts = [len(part) for part in parts]
    sizes, payload = torch.tensor(counts, dtype=torch.int64, device=parts[0].device), torch.cat(parts)
    arriving = torch.zeros_like(sizes)
    if pending is not None:
        pending.hold(dist.all_to_all_single(arriving, sizes, group=group, async_op=True), arriving, sizes)
        received, none = payload[:0], [0] * len(parts)
        work = dist.all_to_all_single(received, payload, none, counts, group=group, async_op=True)
        pending.hold(work, received, payload)
        return []
    dist.all_to_all_single(arriving, sizes, group=group)
    arriving = arriving.tolist()
    received = torch.empty(sum(arriving), dtype=torch.uint8, device=sizes.device)
    dist.all_to_all_single(received, payload, arriving, counts, group=group)
    return list(received.split(arriving))


def broadcast_in_replica(batch: Batch | None, names: list[str], role_groups: RoleGroups) -> Batch:
    """Every rank of a lane gets the header and these fields of its leader's batch; others' batches are ignored."""
    ranks = role_groups.replica
    if len(ranks) == 1:
        return batch
    names = list(dict.fromkeys(HEADER + names))
    buffer = to_bytes(batch, names) if role_groups.is_leader else None
    size = torch.tensor([len(buffer) if role_groups.is_leader else 0], dtype=torch.int64, device=device.device())
    dist.broadcast(size, ranks[0], group=role_groups.replica_group)
    if not role_groups.is_leader:
        buffer = torch.empty(int(size), dtype=torch.uint8, device=device.device())
    dist.broadcast(buffer, ranks[0], group=role_groups.replica_group)
    return from_bytes(buffer, names)


def is_already_there(mesh: RoleMesh, source: str, destination: str, dp_assignment: dict[str, Tensor]) -> bool:
    """Whether every rank of the destination holds its sequences already, as a rank of the source."""
    return mesh[source].replicas == mesh[destination].replicas and torch.equal(
        dp_assignment[source], dp_assignment[destination]
    )


def are_disjoint(mesh: RoleMesh, one: str, other: str) -> bool:
    """Whether no rank works for both roles."""
    return set(mesh[one].ranks).isdisjoint(mesh[other].ranks)


def send(
    mesh: RoleMesh, batch: Batch | None, source: str, destination: str, names: list[str], dp_assignment: dict[str, Tensor],
    pending: PendingSends | None = None,
) -> Batch | None:  # fmt: skip
    """Moves fields of a batch from the lanes of one role to the lanes of another.

    A collective of the two roles' ranks; others return at once. Returns this rank's share of the destination with the
    header and the named fields in ascending `sequence_ids`, or None outside the destination.

    Args:
        batch: this rank's on the source's ranks (all ranks of a lane hold it), ignored elsewhere.
        dp_assignment: role -> [N] int64, the lane of each sequence id; the same on every rank.
        pending: where the source's ranks leave the waiting; the same choice on every rank, of roles that are apart.
            All calls between the two roles must come in one order on all their ranks.
    """
    here, there = mesh[source], mesh[destination]
    names = list(dict.fromkeys(HEADER + names))
    if is_already_there(mesh, source, destination, dp_assignment):
        return Batch(**{n: getattr(batch, n) for n in names}) if there.is_member else None
    received = None
    if here.is_leader or there.is_leader:
        group = mesh.leaders_group(source, destination)
        given = batch if here.is_leader else None
        received = _exchange(
            given, there, names, dp_assignment[destination], group, pending if here.is_leader else None
        )
    return broadcast_in_replica(received, names, there) if there.is_member else None


def _exchange(
    batch: Batch | None, there: RoleGroups, names: list[str], dp_assignment: Tensor, group, pending: PendingSends | None
) -> Batch:  # fmt: skip
    ranks = dist.get_process_group_ranks(group)
    parts = dict.fromkeys(ranks, torch.empty(0, dtype=torch.uint8, device=device.device()))
    if batch is not None:
        replicas = dp_assignment.to(batch.sequence_ids.device)[batch.sequence_ids]
        for dp_rank, leader in enumerate(there.leaders):
            parts[leader] = to_bytes(batch.select((replicas == dp_rank).nonzero().flatten()), names)
    arrived = filter(len, _all_to_all([parts[rank] for rank in ranks], group, pending))
    return concatenate([from_bytes(part, names) for part in arrived] or [empty_batch(names, device.device())])
