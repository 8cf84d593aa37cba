"""Moves weights from one model to another of any layout on any ranks, by collectives over the ranks of both.

The plan is built once. A transfer is a few rounds of messages. A large box goes as it lies in memory from the one
model's tensor into the other's; small ones to the same rank are packed together, in the destination's dtype, as are
boxes with gaps. What a rank needs of its own it copies.
"""

import math
from collections import defaultdict
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.mcore import device
from megarl.mcore.weights.reshard_plan import (
    LocalWeights,
    ShardCopy,
    WeightShard,
    check,
    merge_wholes,
    shard_copies,
    split_copy,
)

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
ELEMENTS_AT_ONCE = 2**18  # of a checksum: its 64-bit numbers fit into a cache, twenty times faster than without
LARGE = 2**16  # bytes of a box that is worth a message
NAMED = 5  # keys in an error message


class _Message(NamedTuple):
    """Pieces between this rank and a peer, behind each other: a large one alone, or small ones."""

    peer: int
    pieces: list[ShardCopy]
    size: int  # elements


class _Round(NamedTuple):
    """What this rank sends and receives at a time."""

    dtype: torch.dtype
    sends: list[_Message]
    receives: list[_Message]


class WeightTransfer:
    """A plan between two models, and its execution. All methods are collectives of the group."""

    def __init__(
        self,
        source,
        source_pg_collection,
        destination,
        destination_pg_collection,
        group,
        bucket_bytes: int = 64 * 2**20,
    ):
        """Agrees on the plan.

        Args:
            source: the model's chunks on this rank, or None on ranks that do not hold it.
            source_pg_collection: process groups of the source's role.
            destination, destination_pg_collection: the same of the model to be filled.
            group: all ranks of both.
            bucket_bytes: most bytes that a rank sends, and that it receives, in one exchange.

        Raises:
            ValueError: a key that one side lacks, that has another shape, or that the source does not hold as a whole.
        """
        self.group, self.rank = group, dist.get_rank(group)
        self.source = LocalWeights(source, source_pg_collection)
        self.destination = LocalWeights(destination, destination_pg_collection)
        gathered = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, (self.source.description(), self.destination.description()), group=group)
        sources, destinations = zip(*gathered, strict=True)
        check(sources, destinations)
        self.dtypes = {key: whole.dtype for key, whole in merge_wholes("destination", destinations).items()}
        pieces = shard_copies(self.rank, sources, destinations)
        self.local = [piece for piece in pieces if piece.sender == piece.receiver]
        self.rounds = self._rounds([piece for piece in pieces if piece.sender != piece.receiver], bucket_bytes)
        self.bytes_sent = sum(m.size * turn.dtype.itemsize for turn in self.rounds for m in turn.sends)
        self._staging: dict[str, Tensor] = {}

    def run(self) -> int:
        """Moves the weights; returns the bytes that this rank sent to others."""
        for piece in self.local:
            self._target(piece).copy_(self._origin(piece))
        for turn in self.rounds:
            self._exchange(turn)
        return self.bytes_sent

    def verify(self):
        """Compares every weight of the destination, on all its ranks, with the source's.

        Raises:
            RuntimeError: names the keys whose checksums differ.
        """
        there = _checksum(self.destination, self.group)
        here = _checksum(self.source, self.group, self.dtypes)
        wrong = [key for key in sorted(here) if here[key] != there[key]]
        if wrong:
            more = f" and {len(wrong) - NAMED} more" if len(wrong) > NAMED else ""
            raise RuntimeError(f"weights differ after their transfer: {', '.join(wrong[:NAMED])}{more}")

    def _origin(self, piece: ShardCopy) -> Tensor:
        return self.source.view(piece.source, piece.offset, piece.shape)

    def _target(self, piece: ShardCopy) -> Tensor:
        return self.destination.view(piece.destination, piece.offset, piece.shape)

    def _dtype(self, piece: ShardCopy) -> torch.dtype:
        return self.dtypes[piece.destination.key]

    def _largest(self, numbers: list[int]) -> list[int]:
        """The largest of each number over the group."""
        values = torch.tensor(numbers, dtype=torch.int64, device=device.device())
        dist.all_reduce(values, dist.ReduceOp.MAX, group=self.group)
        return values.tolist()

    def _rounds(self, pieces: list[ShardCopy], bucket_bytes: int) -> list[_Round]:
        """Deals the pieces between each two ranks into rounds; both of them deal alike, knowing nothing of others."""
        peers = [{p.receiver for p in pieces} - {self.rank}, {p.sender for p in pieces} - {self.rank}]
        most_peers = max(1, *self._largest([len(p) for p in peers]))
        dtypes = sorted(set(self.dtypes.values()), key=str)
        streams = {dtype: defaultdict(list) for dtype in dtypes}
        for piece in pieces:
            streams[self._dtype(piece)][piece.sender, piece.receiver].append(piece)
        dealt = {}
        for dtype, by_pair in streams.items():
            quota = max(1, bucket_bytes // most_peers // dtype.itemsize)
            dealt[dtype] = {pair: _into_buckets(stream, quota) for pair, stream in by_pair.items()}
        counts = self._largest([max(map(len, dealt[dtype].values()), default=0) for dtype in dtypes])
        return [
            self._round(dtype, dealt[dtype], number)
            for dtype, count in zip(dtypes, counts, strict=True)
            for number in range(count)
        ]

    def _round(self, dtype: torch.dtype, dealt: dict, number: int) -> _Round:
        """This rank's part of a round."""
        turn = _Round(dtype, [], [])
        for (sender, receiver), hands in sorted(dealt.items()):
            hand = hands[number] if number < len(hands) else []
            side, peer = (turn.sends, receiver) if sender == self.rank else (turn.receives, sender)
            side.extend(_messages(peer, hand, dtype))
        return turn

    def _exchange(self, turn: _Round):
        """A round: whoever is the peer does the same in its own, and in the same order."""
        operations, staged, used = [], [], 0
        for message in turn.receives:
            target = self._target(message.pieces[0])
            if not _goes_as_it_is(message, target, turn.dtype):
                target = self._stage("receives", turn.dtype)[used : used + message.size]
                used += message.size
                staged.append((target, message.pieces))
            operations.append(dist.P2POp(dist.irecv, target.view(-1), group=self.group, group_peer=message.peer))
        used = 0
        for message in turn.sends:
            origin = self._origin(message.pieces[0])
            if not _goes_as_it_is(message, origin, turn.dtype):
                origin = self._stage("sends", turn.dtype)[used : used + message.size]
                used += message.size
                for piece, part in zip(message.pieces, _split(origin, message.pieces), strict=True):
                    part.copy_(self._origin(piece))
            operations.append(dist.P2POp(dist.isend, origin.view(-1), group=self.group, group_peer=message.peer))
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        for memory, pieces in staged:
            for piece, part in zip(pieces, _split(memory, pieces), strict=True):
                self._target(piece).copy_(part)

    def _stage(self, side: str, dtype: torch.dtype) -> Tensor:
        """One buffer a side for all rounds and transfers, with room for what a round has to pack."""
        if side not in self._staging:
            view = self._origin if side == "sends" else self._target
            most = 0
            for turn in self.rounds:
                packed = (m for m in getattr(turn, side) if not _goes_as_it_is(m, view(m.pieces[0]), turn.dtype))
                most = max(most, sum(m.size for m in packed) * turn.dtype.itemsize)
            self._staging[side] = torch.empty(most, dtype=torch.uint8, device=device.device())
        return self._staging[side][: self._staging[side].nbytes // dtype.itemsize * dtype.itemsize].view(dtype)


def _messages(peer: int, hand: list[ShardCopy], dtype: torch.dtype) -> list[_Message]:
    """Large pieces of a hand, each in a message, and the others in one."""
    sizes = {piece: math.prod(piece.shape) for piece in hand}
    small = [piece for piece in hand if sizes[piece] * dtype.itemsize < LARGE]
    alone = [_Message(peer, [piece], sizes[piece]) for piece in hand if sizes[piece] * dtype.itemsize >= LARGE]
    return alone + ([_Message(peer, small, sum(map(sizes.get, small)))] if small else [])


def _goes_as_it_is(message: _Message, memory: Tensor, dtype: torch.dtype) -> bool:
    return len(message.pieces) == 1 and memory.dtype == dtype and memory.is_contiguous()


def _into_buckets(pieces: list[ShardCopy], quota: int) -> list[list[ShardCopy]]:
    """The pieces in their order, in hands of at most `quota` elements each; large ones are cut."""
    hands, room = [], 0
    for piece in pieces:
        for part in split_copy(piece, quota):
            size = math.prod(part.shape)
            if size > room:
                hands.append([])
                room = quota
            hands[-1].append(part)
            room -= size
    return hands


def _split(buffer: Tensor, pieces: list[ShardCopy]) -> list[Tensor]:
    """The part of a flat buffer that belongs to each piece, in its shape."""
    parts = buffer.split([math.prod(piece.shape) for piece in pieces])
    return [part.view(piece.shape) for part, piece in zip(parts, pieces, strict=True)]


# -- checksums ---------------------------------------------------------------------------------------------------


def checksum(stages, pg_collection, group) -> dict[str, int]:
    """A number for every key of a model's weights, the same in any layout; on all ranks. A collective of the group.

    The sum, modulo 2^64, of each element's bits times an odd hash of its place in the whole tensor: one changed bit
    always changes it, two exchanged elements do but for chance. Each element counts once.

    Args:
        stages: the model's chunks on this rank, or None on ranks of the group that do not hold it.
        pg_collection: process groups of the model's role.
        group: ranks that call.

    Raises:
        RuntimeError: ranks that should hold the same part of a key hold different bits.
    """
    return _checksum(LocalWeights(stages, pg_collection), group)


def _checksum(weights: LocalWeights, group, dtypes: dict[str, torch.dtype] | None = None) -> dict[str, int]:
    """`checksum` of what the weights are in other dtypes, by key."""
    mine = {}
    wholes, shards = weights.description()
    for shard in shards:
        whole = wholes[shard.key]
        dtype = whole.dtype if dtypes is None else dtypes[shard.key]
        mine[shard] = _sum_of_shard(weights.view(shard), shard, whole.shape, dtype)
    gathered = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, {shard: int(total) for shard, total in mine.items()}, group=group)
    return _sum_by_key(gathered)


def _sum_by_key(gathered: list[dict[WeightShard, int]]) -> dict[str, int]:
    once, differing = {}, set()
    for totals in gathered:
        for shard, total in totals.items():
            if once.setdefault(shard, total) != total:
                differing.add(shard.key)
    if differing:
        raise RuntimeError(f"replicas of the same weights differ: {', '.join(sorted(differing)[:NAMED])}")
    sums = defaultdict(int)
    for shard, total in once.items():
        sums[shard.key] = (sums[shard.key] + total) % 2**64
    return dict(sums)


def _sum_of_shard(values: Tensor, shard: WeightShard, whole: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Sum over a shard of a tensor of the shape `whole`, int64 on its device."""
    strides = [math.prod(whole[axis + 1 :]) for axis in range(len(whole))]
    start = sum(map(math.prod, zip(shard.index + shard.offset, strides, strict=True)))
    if not values.dim():
        values, strides = values.reshape(1), [*strides, 1]
    strides = strides[len(strides) - values.dim() :]
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    rows = max(1, ELEMENTS_AT_ONCE // max(1, values[0].numel()))
    for number, part in enumerate(values.split(rows)):
        places = torch.tensor(start + number * rows * strides[0], device=values.device)
        for axis, size in enumerate(part.shape):
            places = places.unsqueeze(-1) + torch.arange(size, device=values.device) * strides[axis]
        bits = part.to(dtype).contiguous().view(INTEGERS[dtype.itemsize])
        total += (_scatter(places).bitwise_or_(1) * bits).sum()
    return total


def _scatter(numbers: Tensor) -> Tensor:
    """A hash of int64 numbers: the finalizer of SplitMix64 (Steele, Lea, Flood 2014), overflow wanted."""
    numbers = numbers - 0x61C8864680B583EB
    numbers ^= numbers >> 30
    numbers *= -0x40A7B892E31B1A47
    numbers ^= numbers >> 27
    numbers *= -0x6B2FB644ECCEEE15
    numbers ^= numbers >> 31
    return numbers
