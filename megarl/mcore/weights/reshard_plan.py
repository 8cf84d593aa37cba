"""The plan of a weight transfer: which box of which tensor goes from which rank to which.

Models describe their tensors by Megatron's `sharded_state_dict`, whose names, shapes and offsets do not depend on the
layout. Each shard of the destination is filled from the overlapping shards of the source. Every rank derives the same
ordered shard copies from the same descriptions.
"""

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

Coordinates = tuple[int, ...]
BoxView = Callable[[Coordinates, Coordinates], Tensor]  # (offset, shape) -> a view


class WeightShard(NamedTuple):
    """A box of one tensor of a key: a key stacks the tensors of all layers and experts along leading axes."""

    key: str
    index: Coordinates  # type: ignore[assignment]  # hides tuple.index; in the stacked axes
    offset: Coordinates  # in the other axes
    shape: Coordinates


class GlobalTensor(NamedTuple):
    """The whole tensor of a key, stacked over layers and experts."""

    shape: Coordinates  # stacked axes included
    dtype: torch.dtype


# What a rank holds of a model: the whole tensors by key, and its shards; empty on ranks outside its role.
ShardDescription = tuple[dict[str, GlobalTensor], list[WeightShard]]


class ShardCopy(NamedTuple):
    """A box, inside both shards, that is copied from one rank of the group to another or to itself."""

    sender: int
    receiver: int
    source: WeightShard
    destination: WeightShard
    offset: Coordinates
    shape: Coordinates


def overlap(one: tuple[Coordinates, Coordinates], other: tuple[Coordinates, Coordinates]):
    """Returns the intersection (offset, shape) of two boxes (offset, shape); None if it is empty."""
    starts = tuple(map(max, one[0], other[0]))
    ends = (min(a + n, b + m) for a, n, b, m in zip(one[0], one[1], other[0], other[1], strict=True))
    shape = tuple(end - start for start, end in zip(starts, ends, strict=True))
    return (starts, shape) if all(size > 0 for size in shape) else None


def _moved(place: Coordinates, by: Coordinates, back_by: Coordinates) -> Coordinates:
    return tuple(a + b - c for a, b, c in zip(place, by, back_by, strict=True))


# -- what a rank holds -------------------------------------------------------------------------------------------


class LocalWeights:
    """Weights on this rank as shards, and how to reach a box of each in memory: of a model, or of anything else."""

    def __init__(self, wholes: dict[str, GlobalTensor], boxes: dict[WeightShard, BoxView]):
        self.wholes, self._boxes = wholes, boxes

    @property
    def shards(self) -> list[WeightShard]:
        """Of this rank."""
        return list(self._boxes)

    def description(self) -> ShardDescription:
        """Returns the description that other ranks need for the plan."""
        return self.wholes, self.shards

    def view(self, shard: WeightShard, offset: Coordinates | None = None, shape: Coordinates | None = None) -> Tensor:
        """Returns a view of a shard, or of a box (offset, shape) in it."""
        return self._boxes[shard](offset or shard.offset, shape or shard.shape)


def box_view(current: Callable[[], Tensor], origin: Coordinates, offset: Coordinates, shape: Coordinates) -> Tensor:
    """A box of a tensor whose first element is at `origin`; `current` returns it, or a sharded one whose rows it is."""
    data = current().detach()
    data = data.to_local() if isinstance(data, DTensor) else data
    return data[tuple(slice(a - o, a - o + n) for a, o, n in zip(offset, origin, shape, strict=True))]


def model_weights(stages, pg_collection, describe=None) -> LocalWeights:
    """The parameters and persistent buffers of a role's model on this rank.

    Each view is of the present tensor, because an optimizer or an offload may move parameters and replace buffers.

    Args:
        stages: the model's chunks on this rank, or None outside the role.
        describe: (chunk, metadata) -> sharded state; default: of all weights.
    """
    wholes: dict[str, GlobalTensor] = {}
    boxes: dict[WeightShard, BoxView] = {}
    for chunk in () if stages is None else stages:
        getters = {id(tensor): getter for tensor, getter in _tensors(chunk)}
        metadata = {"dp_cp_group": pg_collection.dp_cp}
        state = describe(chunk, metadata) if describe else chunk.sharded_state_dict(metadata=metadata)
        for value in nested_values(state):
            if isinstance(value, (ShardedTensor, ShardedTensorFactory)):
                if id(value.data) not in getters:
                    raise ValueError(f"{value.key}: the model describes a copy of it, which cannot be written to")
                for shard, shape, origin in _shards(value):
                    wholes[shard.key] = GlobalTensor(shape, value.data.dtype)
                    if shard in boxes:
                        raise ValueError(f"{shard.key}: this rank holds the same part of it twice")
                    boxes[shard] = functools.partial(box_view, getters[id(value.data)], origin)
    return LocalWeights(wholes, boxes)


def _shards(value) -> Iterator[tuple[WeightShard, Coordinates, Coordinates]]:
    """Yields the shards as which a parameter is stored, each with the shape of its whole tensor, and with its offset
    less that of the same element in this rank's memory."""
    # An FSDP parameter has the shape of all rows, but only this rank's rows in memory.
    data = value.data
    first, held = (0,) * data.dim(), tuple(data.shape)
    if isinstance(data, DTensor):
        held, first = compute_local_shape_and_global_offset(data.shape, data.device_mesh, data.placements)
    for stored, start in _stored_tensors(value):
        box = overlap((start, stored.local_shape), (tuple(first), tuple(held)))
        if box is None:
            continue
        stacked = stored.prepend_axis_num
        index, offset = stored.global_offset[:stacked], stored.global_offset[stacked:]
        shard = WeightShard(stored.key, tuple(index), _moved(offset, box[0], start), box[1])
        yield shard, tuple(stored.global_shape), _moved(offset, first, start)


def _tensors(chunk):
    """Yields each parameter and buffer of a chunk with a function that returns its current tensor."""
    for parameter in chunk.parameters():
        yield parameter, lambda parameter=parameter: parameter
    for module in chunk.modules():
        for name, buffer in module._buffers.items():
            yield buffer, functools.partial(module._buffers.get, name)


def _stored_tensors(value):
    """Yields the tensors as which a checkpoint stores a parameter, and each one's offset in the parameter."""
    if isinstance(value, ShardedTensor):
        yield value, (0,) * len(value.local_shape)
        return
    # A meta tensor suffices for the offsets of views; an FSDP parameter has no memory for all of its rows.
    whole = torch.empty(value.data.shape, dtype=value.data.dtype, device="meta")
    built = value.build_fn(value.key, whole, value.replica_id, value.flattened_range)
    for stored in nested_values(built):
        data = stored.data
        if data.untyped_storage()._cdata != whole.untyped_storage()._cdata or data.stride() != whole.stride():
            raise ValueError(f"{value.key}: it is stored as something else than boxes of its parameter")
        yield stored, tuple(int(i) for i in torch.unravel_index(torch.tensor(data.storage_offset()), whole.shape))


# -- shard copies between ranks -----------------------------------------------------------------------------------


def merge_wholes(side: str, descriptions: list[ShardDescription]) -> dict[str, GlobalTensor]:
    """Merges what the ranks of one side report of each key; raises ValueError if they disagree."""
    wholes = {}
    for of_rank, _ in descriptions:
        for key, whole in of_rank.items():
            if wholes.setdefault(key, whole) != whole:
                raise ValueError(f"{key}: the ranks of the {side} disagree on it: {wholes[key]} and {whole}")
    return wholes


def _holders(descriptions: list[ShardDescription]) -> dict[tuple, dict[WeightShard, list[int]]]:
    """Returns (key, index) -> its shards -> the ranks that hold a replica of each."""
    holders: dict[tuple, dict[WeightShard, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, (_, shards) in enumerate(descriptions):
        for shard in shards:
            holders[shard[:2]][shard].append(rank)
    return holders


def _overlaps(destination: WeightShard, sources) -> list[tuple[WeightShard, tuple]]:
    boxes = ((source, overlap(source[2:], destination[2:])) for source in sorted(sources))
    return [(source, box) for source, box in boxes if box is not None]


def check(sources: list[ShardDescription], destinations: list[ShardDescription]):
    """Raises ValueError for the first key that cannot be filled exactly, the same on every rank."""
    given, wanted = merge_wholes("source", sources), merge_wholes("destination", destinations)
    for key in sorted(given.keys() ^ wanted.keys()):
        raise ValueError(f"{key}: the {'destination' if key in given else 'source'} has no such weights")
    for key in sorted(given):
        shape, expected = given[key].shape, wanted[key].shape
        if shape != expected:
            raise ValueError(f"{key}: its shape is {shape} in the source, {expected} in the destination")
    held = _holders(sources)
    for tensor, shards in sorted(_holders(destinations).items()):
        for shard in shards:
            covered = sum(math.prod(shape) for _, (_, shape) in _overlaps(shard, held.get(tensor, ())))
            if covered != math.prod(shard.shape):
                raise ValueError(
                    f"{shard.key} at {shard.index}: the source holds {covered} of {math.prod(shard.shape)} elements"
                )


def shard_copies(rank: int, sources: list[ShardDescription], destinations: list[ShardDescription]) -> list[ShardCopy]:
    """Returns all shard copies that a rank sends or receives, in an order that is the same on every rank.

    A rank that holds a replica of what it needs copies from itself. Other receivers are assigned to the replicas round
    robin; the first replica differs from tensor to tensor, so that no replica serves all first receivers.
    """
    copies, held = [], _holders(sources)
    for number, (tensor, shards) in enumerate(sorted(_holders(destinations).items())):
        is_involved = (rank in ranks for side in (held[tensor], shards) for ranks in side.values())
        if not any(is_involved):
            continue
        for destination, receivers in sorted(shards.items()):
            for source, (offset, shape) in _overlaps(destination, held[tensor]):
                senders, next_sender = held[tensor][source], number
                for receiver in receivers:
                    sender = receiver
                    if receiver not in senders:
                        sender, next_sender = senders[next_sender % len(senders)], next_sender + 1
                    if rank in (sender, receiver):
                        copies.append(ShardCopy(sender, receiver, source, destination, offset, shape))
    return copies


def split_copy(copy: ShardCopy, limit: int) -> list[ShardCopy]:
    """Splits a shard copy along its first axes into copies of at most `limit` elements."""
    if math.prod(copy.shape) <= limit:
        return [copy]
    axis = next(i for i, size in enumerate(copy.shape) if size > 1)
    step = max(1, limit // (math.prod(copy.shape) // copy.shape[axis]))
    copies = []
    for start in range(0, copy.shape[axis], step):
        offset, shape = list(copy.offset), list(copy.shape)
        offset[axis], shape[axis] = offset[axis] + start, min(step, shape[axis] - start)
        copies += split_copy(copy._replace(offset=tuple(offset), shape=tuple(shape)), limit)
    return copies
