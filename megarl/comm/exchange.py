"""Moves packed batches between roles with collectives, from replica to replica and never through rank 0.

All fields of all sequences for a destination replica are one byte buffer. The replica leaders of the two roles run one
all-to-all for the sizes and one for the payload; then each replica of several ranks broadcasts inside itself. Roles
with the same sequences on the same ranks pass the batch on without a copy. A rank that only sends does not wait.
"""

import math

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.batch import FIELDS, HEADER, Batch, concatenate, empty_batch
from megarl.comm.role_mesh import RoleGroups, RoleMesh
from megarl.mcore import device

STATES, PARTS = ROWS = ("teacher_states", "reward_parts")  # fields whose items are rows


def _in_wire_order(names: list[str]) -> list[str]:
    """The header, then wide dtypes before narrow ones, so that every field starts aligned."""
    rest = sorted((n for n in names if n not in HEADER), key=lambda n: -FIELDS[n]["dtype"].itemsize)
    return HEADER + rest


def to_bytes(batch: Batch, names: list[str]) -> Tensor:
    """Serializes fields into one uint8 tensor: count (int64), of each field of rows their length (int64), header,
    fields, padding to a multiple of 8 bytes."""
    rows = [getattr(batch, name) for name in ROWS if name in names]
    sizes = [len(batch), *(field.shape[1] if field.dim() > 1 else 1 for field in rows)]
    start = torch.tensor(sizes, dtype=torch.int64, device=batch.lengths.device)
    chunks = [start.view(torch.uint8)]
    chunks += [getattr(batch, name).contiguous().flatten().view(torch.uint8) for name in _in_wire_order(names)]
    size = sum(len(chunk) for chunk in chunks)
    chunks.append(torch.zeros(-size % 8, dtype=torch.uint8, device=start.device))
    return torch.cat(chunks)


def from_bytes(buffer: Tensor, names: list[str]) -> Batch:
    """Restores a batch from the bytes of `to_bytes`, as views of the buffer."""
    rows = [name for name in ROWS if name in names]
    position = 8 * (1 + len(rows))
    count, *widths = buffer[:position].view(torch.int64).tolist()
    fields, total = {}, None
    for name in _in_wire_order(names):
        spec = FIELDS[name]
        number = count if spec["kind"] == "sequence" else total
        shape = (number, widths[rows.index(name)]) if name in rows else (number,)
        size = math.prod(shape) * spec["dtype"].itemsize
        fields[name] = buffer[position : position + size].view(spec["dtype"]).view(shape)
        position += size
        if name == "lengths":
            total = int(fields[name].sum())
    return Batch(**fields)


class PendingSends:
    """Collectives in flight: keeps their buffers alive until `wait`."""

    def __init__(self):
        self._held: list[tuple] = []

    def hold(self, work: dist.Work | None, *buffers: Tensor):
        """Keeps a started collective and its buffers."""
        self._held.append((work, buffers))

    def wait(self):
        """Waits until all sends are received."""
        for work, _ in self._held:
            if work is not None:
                work.wait()
        self._held.clear()


def all_to_all(buffers: list[Tensor], group, pending: PendingSends | None) -> list[Tensor]:
    """Sends buffers[i] (bytes) to the i-th rank of the group; returns the buffers received from each rank. With
    `pending` this rank only sends: it receives nothing, returns at once, and `pending` waits later."""
    counts = [len(buffer) for buffer in buffers]
    sizes, payload = torch.tensor(counts, dtype=torch.int64, device=buffers[0].device), torch.cat(buffers)
    arriving = torch.zeros_like(sizes)
    if pending is not None:
        pending.hold(dist.all_to_all_single(arriving, sizes, group=group, async_op=True), arriving, sizes)
        received, none = payload[:0], [0] * len(buffers)
        work = dist.all_to_all_single(received, payload, none, counts, group=group, async_op=True)
        pending.hold(work, received, payload)
        return []
    dist.all_to_all_single(arriving, sizes, group=group)
    arriving = arriving.tolist()
    received = torch.empty(sum(arriving), dtype=torch.uint8, device=sizes.device)
    dist.all_to_all_single(received, payload, arriving, counts, group=group)
    return list(received.split(arriving))


def all_gather(local: Tensor, group) -> Tensor:
    """Concatenates the equally large tensors of all ranks of a group. Sent as bytes, because gloo has no int16."""
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return local
    gathered = local.new_empty(ranks * len(local), *local.shape[1:])
    if gathered.numel():
        dist.all_gather_into_tensor(gathered.view(torch.uint8), local.contiguous().view(torch.uint8), group=group)
    return gathered


def broadcast_in_replica(batch: Batch | None, names: list[str], role_groups: RoleGroups) -> Batch:
    """The header and these fields of the leader's batch, on every rank of the replica. Other batches are ignored."""
    if len(role_groups.replica) == 1:
        return batch
    names = list(dict.fromkeys(HEADER + names))
    buffer = to_bytes(batch, names) if role_groups.is_leader else None
    size = torch.tensor([len(buffer) if role_groups.is_leader else 0], dtype=torch.int64, device=device.device())
    role_groups.broadcast(size)
    if not role_groups.is_leader:
        buffer = torch.empty(int(size), dtype=torch.uint8, device=device.device())
    return from_bytes(role_groups.broadcast(buffer), names)


def is_already_there(mesh: RoleMesh, source: str, destination: str, dp_assignment: dict[str, Tensor]) -> bool:
    """Whether every rank of the destination already holds its sequences as a rank of the source."""
    return mesh[source].replicas == mesh[destination].replicas and torch.equal(
        dp_assignment[source], dp_assignment[destination]
    )


def send(
    mesh: RoleMesh,
    batch: Batch | None,
    source: str,
    destination: str,
    names: list[str],
    dp_assignment: dict[str, Tensor],
    pending: PendingSends | None = None,
    in_evaluation: bool = False,
) -> Batch | None:
    """Moves fields of a batch from the replicas of one role to the replicas of another.

    Returns this rank's sequences in the destination with the header and the named fields, in ascending order of
    `sequence_ids`, or None outside the destination. A collective of both roles' ranks; others return at once.

    Args:
        batch: this rank's batch in the source (all ranks of a replica hold it), ignored elsewhere.
        dp_assignment: role -> [N] int64, the dp rank of each sequence id; the same on every rank.
        pending: collects the sends of the source's ranks, which then do not wait. All ranks pass it or none does; only
            for disjoint roles, whose ranks must all make the calls between the two roles in the same order.
        in_evaluation: apart from the batches of steps, of which ranks may have sent later ones already.
    """
    sender, receiver = mesh[source], mesh[destination]
    names = list(dict.fromkeys(HEADER + names))
    if is_already_there(mesh, source, destination, dp_assignment):
        return Batch(**{n: getattr(batch, n) for n in names}) if receiver.is_member else None
    received = None
    if sender.is_leader or receiver.is_leader:
        group = mesh.leaders_group(source, destination, in_evaluation)
        ranks = dist.get_process_group_ranks(group)
        buffers = dict.fromkeys(ranks, torch.empty(0, dtype=torch.uint8, device=device.device()))
        if sender.is_leader and batch is not None:
            buffers |= _bytes_by_leader(batch, receiver, names, dp_assignment[destination])
        pending = pending if sender.is_leader else None
        arrived = filter(len, all_to_all([buffers[rank] for rank in ranks], group, pending))
        parts = [from_bytes(buffer, names) for buffer in arrived]
        received = concatenate(parts or [empty_batch(names, device.device())])
    return broadcast_in_replica(received, names, receiver) if receiver.is_member else None


def _bytes_by_leader(batch: Batch, receiver: RoleGroups, names: list[str], dp_assignment: Tensor) -> dict[int, Tensor]:
    # Read once: what is sent where is decided on the host, and does not wait for the device again.
    host = Batch(sequence_ids=batch.sequence_ids.cpu(), lengths=batch.lengths.cpu())
    sent, buffers = Batch(**{name: getattr(batch, name) for name in names}), {}
    dp_ranks = dp_assignment[host.sequence_ids]
    for dp_rank in dp_ranks.unique().tolist():  # others get nothing: their number grows with the world
        index = (dp_ranks == dp_rank).nonzero().flatten()
        rows, tokens = device.to_device([index.numpy(), host.token_positions(index).numpy()])
        buffers[receiver.leaders[dp_rank]] = to_bytes(sent.take(rows, tokens), names)
    return buffers
