"""Which box of which tensor goes from which rank to which, so that one model's weights fill another layout.

A model describes its tensors by Megatron's `sharded_state_dict`: their names, shapes and offsets do not depend on the
layout. A destination's box is filled from the boxes of the source that overlap with it; every rank derives the same
order of pieces from the same descriptions.
"""

import functools
import math
from collections import defaultdict
from typing import NamedTuple

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

Coordinates = tuple[int, ...]


class WeightShard(NamedTuple):
    """A box of the tensor at one place of a key: layers and experts are stacked in leading axes of the key."""

    key: str
    index: Coordinates  # in the stacked axes
    offset: Coordinates  # in the others
    shape: Coordinates


class GlobalTensor(NamedTuple):
    """What is the same for all shards of a key."""

    shape: Coordinates  # stacked axes included
    dtype: torch.dtype


class ShardDescription(NamedTuple):
    """What a rank holds of a model; nothing outside the role."""

    wholes: dict[str, GlobalTensor]
    shards: list[WeightShard]


class ShardCopy(NamedTuple):
    """A box that goes from one rank of the group to another, or stays on it; it lies within both shards."""

    sender: int
    receiver: int
    source: WeightShard
    destination: WeightShard
    offset: Coordinates
    shape: Coordinates


def overlap(one: tuple[Coordinates, Coordinates], other: tuple[Coordinates, Coordinates]):
    """(offset, shape) of what two boxes (offset, shape) share; None where that is nothing."""
    starts = tuple(map(max, one[0], other[0]))
    ends = (min(a + n, b + m) for a, n, b, m in zip(*one, *other, strict=True))
    shape = tuple(end - start for start, end in zip(starts, ends, strict=True))
    return (starts, shape) if all(size > 0 for size in shape) else None


def _minus(one: Coordinates, other: Coordinates) -> Coordinates:
    return tuple(a - b for a, b in zip(one, other, strict=True))


def _plus(one: Coordinates, other: Coordinates) -> Coordinates:
    return tuple(a + b for a, b in zip(one, other, strict=True))


# -- what a rank holds -------------------------------------------------------------------------------------------


class LocalWeights:
    """The parameters and persistent buffers of a role's model on this rank, seen as shards.

    Views are taken anew at each call: an optimizer or an offload may give a parameter new memory, and replaces buffers.
    """

    def __init__(self, stages, pg_collection):
        """`stages`: the model's chunks on this rank, or None outside the role; `pg_collection`: the role's groups."""
        self.wholes, self._places = {}, {}
        for chunk in () if stages is None else stages:
            owned = {id(tensor): getter for tensor, getter in _tensors(chunk)}
            for value in nested_values(chunk.sharded_state_dict(metadata={"dp_cp_group": pg_collection.dp_cp})):
                if isinstance(value, (ShardedTensor, ShardedTensorFactory)):
                    if id(value.data) not in owned:
                        raise ValueError(f"{value.key}: the model describes a copy of it, which cannot be written to")
                    self._add(value, owned[id(value.data)])

    def description(self) -> ShardDescription:
        """What other ranks must know."""
        return ShardDescription(self.wholes, list(self._places))

    def view(self, shard: WeightShard, offset: Coordinates | None = None, shape: Coordinates | None = None) -> Tensor:
        """The memory of a shard, or of a box (offset, shape) in it."""
        getter, start = self._places[shard]
        data = getter().detach()
        data = data.to_local() if isinstance(data, DTensor) else data
        start = start if offset is None else _plus(start, _minus(offset, shard.offset))
        shape = shard.shape if shape is None else shape
        return data[tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))]

    def _add(self, value, getter):
        # A sharded parameter has all rows in name, and the rows of this rank in memory.
        held = (0,) * value.data.dim(), tuple(value.data.shape)
        if isinstance(value.data, DTensor):
            shape, start = compute_local_shape_and_global_offset(
                value.data.shape, value.data.device_mesh, value.data.placements
            )
            held = tuple(start), tuple(shape)
        for part, start in _stored_tensors(value):
            box = overlap((start, part.local_shape), held)
            if box is None:
                continue
            stacked = part.prepend_axis_num
            index, offset = part.global_offset[:stacked], part.global_offset[stacked:]
            shard = WeightShard(part.key, tuple(index), _plus(offset, _minus(box[0], start)), box[1])
            self.wholes[part.key] = GlobalTensor(tuple(part.global_shape), value.data.dtype)
            if shard in self._places:
                raise ValueError(f"{part.key}: this rank holds the same part of it twice")
            self._places[shard] = getter, _minus(box[0], held[0])


def _tensors(chunk):
    """Each parameter and buffer of a chunk with a function that returns what stands in its place later."""
    for parameter in chunk.parameters():
        yield parameter, lambda parameter=parameter: parameter
    for module in chunk.modules():
        for name, buffer in module._buffers.items():
            yield buffer, functools.partial(module._buffers.get, name)


def _stored_tensors(value):
    """The tensors that a parameter is stored as, and where in the parameter each begins."""
    if isinstance(value, ShardedTensor):
        yield value, (0,) * len(value.local_shape)
        return
    # Without memory: what matters is where its views begin, and a sharded parameter has no views of all its rows.
    whole = torch.empty(value.data.shape, dtype=value.data.dtype, device="meta")
    built = value.build_fn(value.key, whole, value.replica_id, value.flattened_range)
    for part in nested_values(built):
        if part.data.untyped_storage()._cdata != whole.untyped_storage()._cdata or part.data.stride() != whole.stride():
            raise ValueError(f"{value.key}: it is stored as something else than boxes of its parameter")
        yield part, tuple(int(i) for i in torch.unravel_index(torch.tensor(part.data.storage_offset()), whole.shape))


# -- who sends what ----------------------------------------------------------------------------------------------


def merge_wholes(side: str, descriptions: list[ShardDescription]) -> dict[str, GlobalTensor]:
    """What the ranks of one side say of each key. ValueError where they differ."""
    wholes = {}
    for description in descriptions:
        for key, whole in description.wholes.items():
            if wholes.setdefault(key, whole) != whole:
                raise ValueError(f"{key}: the ranks of the {side} disagree on it: {wholes[key]} and {whole}")
    return wholes


def _holders(descriptions: list[ShardDescription]) -> dict[tuple, dict[WeightShard, list[int]]]:
    """(key, index) -> its shards -> the ranks that hold a replica of each."""
    holders = defaultdict(lambda: defaultdict(list))
    for rank, description in enumerate(descriptions):
        for shard in description.shards:
            holders[shard[:2]][shard].append(rank)
    return holders


def _overlaps(destination: WeightShard, sources) -> list[tuple[WeightShard, tuple]]:
    found = ((source, overlap(source[2:], destination[2:])) for source in sorted(sources))
    return [(source, box) for source, box in found if box is not None]


def check(sources: list[ShardDescription], destinations: list[ShardDescription]):
    """Raises ValueError that names the first key which cannot be filled exactly; the same on every rank."""
    here, there = merge_wholes("source", sources), merge_wholes("destination", destinations)
    for key in sorted(here.keys() ^ there.keys()):
        raise ValueError(f"{key}: the {'destination' if key in here else 'source'} has no such weights")
    for key in sorted(here):
        if here[key].shape != there[key].shape:
            raise ValueError(
                f"{key}: its shape is {here[key].shape} in the source, {there[key].shape} in the destination"
            )
    held = _holders(sources)
    for place, shards in sorted(_holders(destinations).items()):
        for shard in shards:
            covered = sum(math.prod(shape) for _, (_, shape) in _overlaps(shard, held.get(place, ())))
            if covered != math.prod(shard.shape):
                raise ValueError(
                    f"{shard.key} at {shard.index}: the source holds {covered} of {math.prod(shard.shape)} elements"
                )


def shard_copies(rank: int, sources: list[ShardDescription], destinations: list[ShardDescription]) -> list[ShardCopy]:
    """All pieces that a rank sends or receives, in an order that is the same on every rank.

    A rank that holds a replica of what it needs copies from itself. The others take turns among the replicas; where
    the turns begin differs from tensor to tensor, so that no replica serves the first receiver of all of them.
    """
    pieces, held = [], _holders(sources)
    for number, (place, shards) in enumerate(sorted(_holders(destinations).items())):
        ranks = (rank in found for side in (held[place], shards) for found in side.values())
        if not any(ranks):
            continue
        for destination, receivers in sorted(shards.items()):
            for source, box in _overlaps(destination, held[place]):
                senders, turn = held[place][source], number
                for receiver in receivers:
                    sender = receiver
                    if receiver not in senders:
                        sender, turn = senders[turn % len(senders)], turn + 1
                    if rank in (sender, receiver):
                        pieces.append(ShardCopy(sender, receiver, source, destination, *box))
    return pieces


def split_copy(piece: ShardCopy, limit: int) -> list[ShardCopy]:
    """A piece in parts of at most `limit` elements, along its first axes."""
    if math.prod(piece.shape) <= limit:
        return [piece]
    axis = next(i for i, size in enumerate(piece.shape) if size > 1)
    step = max(1, limit // (math.prod(piece.shape) // piece.shape[axis]))
    parts = []
    for start in range(0, piece.shape[axis], step):
        offset, shape = list(piece.offset), list(piece.shape)
        offset[axis], shape[axis] = offset[axis] + start, min(step, shape[axis] - start)
        parts += split_copy(piece._replace(offset=tuple(offset), shape=tuple(shape)), limit)
    return parts
