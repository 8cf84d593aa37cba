"""Sends the images of responses to the replicas that get the responses, each image once for a replica.

Their rows are what the rollout's tower computed. So a receiver has the same bits without a tower of its own, and an
image is computed once. The buffers travel as those of `exchange`: between leaders, then inside the replica.
"""

import math

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.batch import Batch
from megarl.comm import exchange
from megarl.comm.role_mesh import RoleGroups, RoleMesh
from megarl.data.images.names import key_of
from megarl.mcore import device
from megarl.mcore.vision.store import Image, ImageStore


def keys_of(tokens: Tensor) -> list[int]:
    """The keys of the images among tokens [T], in ascending order."""
    return key_of(tokens[tokens < 0]).unique().tolist()


def to_bytes(store: ImageStore, keys: list[int]) -> Tensor:
    """Images of a store as uint8: their count; of each its key and size, int64; their embeddings and features."""
    images = [store[key] for key in keys]
    header = [len(keys), *(number for key, image in zip(keys, images, strict=True) for number in (key, *image.size))]
    parts = [torch.tensor(header, dtype=torch.int64), *(part for image in images for part in image[1:])]
    return torch.cat([part.contiguous().flatten().view(torch.uint8) for part in parts])


def from_bytes(store: ImageStore, buffer: Tensor) -> list[int]:
    """Puts the images of a buffer of `to_bytes` into a store of a model with the same tower and precision; returns
    their keys."""
    (count,) = buffer[:8].clone().view(torch.int64).tolist()  # a copy: it may begin at any byte
    at = 8 + 32 * count
    header = buffer[8:at].clone().view(torch.int64).view(count, 4).tolist()
    for key, *size in header:
        rows = size[0] * size[1] * size[2]
        parts = []
        for shape in ((rows, store.hidden), (store.layers, rows, store.hidden)):
            end = at + math.prod(shape) * store.dtype.itemsize
            parts.append(buffer[at:end].clone().view(store.dtype).view(shape))
            at = end
        if key not in store:
            store.put(key, Image((size[0], size[1], size[2]), parts[0], parts[1]))
    return [key for key, *_ in header]


def send(
    mesh: RoleMesh,
    store: ImageStore | None,
    batch: Batch | None,
    source: str,
    destination: str,
    dp_assignment: dict[str, Tensor],
    pending: exchange.PendingSends | None = None,
):
    """Sends what the sequences of a batch that a role's replicas get have of images. A collective of both roles' ranks;
    others return at once.

    Args:
        store: of this rank's models in either role; None elsewhere.
        batch: this rank's in the source, ignored elsewhere.
        dp_assignment, pending: as of `exchange.send`.
    """
    sender, receiver = mesh[source], mesh[destination]
    if exchange.is_already_there(mesh, source, destination, dp_assignment):
        return
    arrived: list[Tensor] = []
    if sender.is_leader or receiver.is_leader:
        group = mesh.leaders_group(source, destination, False)
        ranks = dist.get_process_group_ranks(group)
        buffers = dict.fromkeys(ranks, torch.empty(0, dtype=torch.uint8))
        if sender.is_leader and batch is not None:
            dp_ranks, tokens = dp_assignment[destination][batch.sequence_ids.cpu()], batch.tokens.cpu()
            of_sequences = tokens.split(batch.lengths.tolist())
            for dp_rank in dp_ranks.unique().tolist():
                own = torch.cat(
                    [each for each, of in zip(of_sequences, dp_ranks.tolist(), strict=True) if of == dp_rank]
                )
                buffers[receiver.leaders[dp_rank]] = to_bytes(store, keys_of(own))
        own_pending = pending if sender.is_leader else None
        arrived = exchange.all_to_all([buffers[rank].to(device.device()) for rank in ranks], group, own_pending)
    if receiver.is_member:
        received = [key for each in arrived if len(each) for key in from_bytes(store, each.cpu())]
        _share_in_replica(store, received, receiver)


def _share_in_replica(store: ImageStore, keys: list[int], role_groups: RoleGroups):
    """Gives all ranks of a replica the images that its leader has got."""
    if len(role_groups.replica) == 1:
        return
    buffer = to_bytes(store, sorted(set(keys))).to(device.device())
    size = role_groups.broadcast_number(len(buffer))
    if not role_groups.is_leader:
        buffer = torch.empty(size, dtype=torch.uint8, device=device.device())
    role_groups.broadcast(buffer)
    if not role_groups.is_leader:
        from_bytes(store, buffer.cpu())
