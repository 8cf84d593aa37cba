"""Moves weights from one model to another of any layout on any ranks, by collectives over the ranks of both.

The plan is built once; a transfer runs a few rounds of messages. A large contiguous box is sent straight from one
model's tensor into the other's. Other boxes go through a staging buffer in the destination's dtype, and small ones to
the same rank share a message. Boxes that stay on a rank are copied locally.
"""

import contextlib
import functools
import itertools
import math
from collections import defaultdict
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.mcore import device
from megarl.mcore.parallel import fsdp
from megarl.mcore.weights.reshard_plan import (
    GlobalTensor,
    LocalWeights,
    ShardCopy,
    WeightShard,
    box_view,
    check,
    merge_wholes,
    shard_copies,
    split_copy,
)

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes
ELEMENTS_AT_ONCE = 2**18  # per chunk of a checksum: its 64-bit temporaries fit into a cache, twenty times faster
LARGE_BYTES = 2**16  # minimum bytes of a box that gets its own message
NAMED = 5  # maximum keys in an error message


class _Message(NamedTuple):
    """One or more shard copies between this rank and a peer: one large copy, or small ones concatenated."""

    peer: int
    copies: list[ShardCopy]
    size: int  # elements
    dtype: torch.dtype


Round = dict[str, list[_Message]]  # what this rank "sends" and "receives" in one exchange


class WeightTransfer:
    """Plans and runs weight transfers between two models. All methods are collectives of the group.

    Ranks that hold one of the models alone only send or only receive.
    """

    def __init__(self, source: LocalWeights, destination: LocalWeights, group, bucket_bytes: int = 64 * 2**20):
        """Builds the plan.

        Args:
            source, destination: weights of both models on this rank, empty on ranks that do not hold the model.
            group: all ranks of both.
            bucket_bytes: maximum bytes that a rank sends, and that it receives, in one exchange.

        ValueError for a key that is missing on one side, has different shapes, or is incomplete in the source.
        """
        self.group, self.rank = group, dist.get_rank(group)
        self.source, self.destination = source, destination
        gathered: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, (self.source.description(), self.destination.description()), group=group)
        sources, destinations = [of_rank[0] for of_rank in gathered], [of_rank[1] for of_rank in gathered]
        check(sources, destinations)
        self.dtypes = {key: whole.dtype for key, whole in merge_wholes("destination", destinations).items()}
        copies = shard_copies(self.rank, sources, destinations)
        self.local = [copy for copy in copies if copy.sender == copy.receiver]
        self.rounds = self._plan_rounds([copy for copy in copies if copy.sender != copy.receiver], bucket_bytes)
        self.bytes_sent = sum(m.size * m.dtype.itemsize for round_ in self.rounds for m in round_["sends"])
        total = torch.tensor(self.bytes_sent, dtype=torch.int64, device=device.device())
        dist.all_reduce(total, group=group)
        self.total_bytes = int(total)  # sent by all ranks
        self._staging: dict[str, Tensor] = {}

    def run(self) -> int:
        """Transfers the weights; returns the bytes that this rank sent to others."""
        for copy in self.local:
            self._destination_view(copy).copy_(self._source_view(copy))
        for round_ in self.rounds:
            self._exchange(round_)
        return self.bytes_sent

    def send_copy(self) -> list[tuple[dist.Work | None, Tensor]]:
        """Begins to send a copy of what this rank sends in `run`, and returns at once: the source may then change.

        For ranks that only send. Their receivers call `run`, in the same order of transfers. Returns the sends, and the
        memory of each, which has to live until the send is done.
        """
        operations: list[dist.P2POp] = []
        for round_ in self.rounds:
            for message in round_["sends"]:
                memory = torch.empty(message.size, dtype=message.dtype, device=device.device())
                self._pack(memory, message)
                operations.append(dist.P2POp(dist.isend, memory, group=self.group, group_peer=message.peer))
        works = dist.batch_isend_irecv(operations) if operations else []  # NCCL: one for all of them
        return [(work, operation.tensor) for work, operation in itertools.zip_longest(works, operations)]

    def free_staging(self):
        """Frees the staging buffers; the next transfer allocates them again."""
        self._staging.clear()

    def verify(self):
        """Compares every weight of the destination, on all its ranks, with the source's; RuntimeError, which names
        them, if some differ."""
        self.check(self.source_checksums(self.group), self.group)

    def source_checksums(self, group) -> dict[str, int]:
        """Checksum of every weight of the source in the destination's dtypes; a collective of its ranks, `group`."""
        return checksum(self.source, group, self.dtypes)

    def check(self, expected: dict[str, int], group):
        """As `verify`, against checksums of the source; a collective of the destination's ranks, `group`."""
        received = checksum(self.destination, group)
        wrong = [key for key in sorted(expected) if expected[key] != received.get(key)]
        if wrong:
            more = f" and {len(wrong) - NAMED} more" if len(wrong) > NAMED else ""
            raise RuntimeError(f"weights differ after their transfer: {', '.join(wrong[:NAMED])}{more}")

    def _source_view(self, copy: ShardCopy) -> Tensor:
        return self.source.view(copy.source, copy.offset, copy.shape)

    def _destination_view(self, copy: ShardCopy) -> Tensor:
        return self.destination.view(copy.destination, copy.offset, copy.shape)

    def _pack(self, memory: Tensor, message: _Message):
        for copy, box in zip(message.copies, _split(memory, message.copies), strict=True):
            box.copy_(self._source_view(copy))

    def _max_over_group(self, numbers: list[int]) -> list[int]:
        values = torch.tensor(numbers, dtype=torch.int64, device=device.device())
        dist.all_reduce(values, dist.ReduceOp.MAX, group=self.group)
        return values.tolist()

    def _plan_rounds(self, copies: list[ShardCopy], bucket_bytes: int) -> list[Round]:
        """Assigns shard copies to rounds; both ranks of a pair derive the same rounds without knowing other pairs'."""
        peers = [{c.receiver for c in copies} - {self.rank}, {c.sender for c in copies} - {self.rank}]
        max_peers = max(1, *self._max_over_group([len(p) for p in peers]))
        dtypes = sorted(set(self.dtypes.values()), key=str)
        by_dtype = {dtype: defaultdict(list) for dtype in dtypes}
        for copy in copies:
            by_dtype[self.dtypes[copy.destination.key]][copy.sender, copy.receiver].append(copy)
        buckets = []
        for dtype, by_pair in by_dtype.items():
            bucket_size = max(1, bucket_bytes // max_peers // dtype.itemsize)
            buckets.append({pair: _into_buckets(by_pair[pair], bucket_size) for pair in sorted(by_pair)})
        counts = self._max_over_group([max(map(len, by_pair.values()), default=0) for by_pair in buckets])
        rounds = []
        for dtype, by_pair, count in zip(dtypes, buckets, counts, strict=True):
            for number in range(count):
                rounds.append({"receives": [], "sends": []})
                for (sender, receiver), of_pair in by_pair.items():
                    bucket = of_pair[number] if number < len(of_pair) else []
                    side, peer = ("sends", receiver) if sender == self.rank else ("receives", sender)
                    rounds[-1][side] += _messages(peer, bucket, dtype)
        return rounds

    def _exchange(self, round_: Round):
        """Runs a round; its peers run theirs, with the same messages in the same order."""
        operations, staged = [], []
        for side, action, view_of in (
            ("receives", dist.irecv, self._destination_view),
            ("sends", dist.isend, self._source_view),
        ):
            used = 0
            for message in round_[side]:
                memory = view_of(message.copies[0])
                if not _needs_no_staging(message, memory):
                    memory = self._stage(side, message.dtype)[used : used + message.size]
                    used += message.size
                    if side == "sends":
                        self._pack(memory, message)
                    else:
                        staged.append((memory, message.copies))
                operations.append(dist.P2POp(action, memory.view(-1), group=self.group, group_peer=message.peer))
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        for memory, copies in staged:
            for copy, box in zip(copies, _split(memory, copies), strict=True):
                self._destination_view(copy).copy_(box)

    def _stage(self, side: str, dtype: torch.dtype) -> Tensor:
        """Returns the staging buffer of a side, shared by all rounds and transfers and sized for the largest round."""
        if side not in self._staging:
            view, size = self._source_view if side == "sends" else self._destination_view, 0
            for round_ in self.rounds:
                packed = (m for m in round_[side] if not _needs_no_staging(m, view(m.copies[0])))
                size = max(size, sum(m.size * m.dtype.itemsize for m in packed))
            self._staging[side] = torch.empty(size, dtype=torch.uint8, device=device.device())
        return self._staging[side][: self._staging[side].nbytes // dtype.itemsize * dtype.itemsize].view(dtype)


def _messages(peer: int, bucket: list[ShardCopy], dtype: torch.dtype) -> list[_Message]:
    """The messages of a bucket: one for each large copy, and one for all small ones."""
    sizes = {copy: math.prod(copy.shape) for copy in bucket}
    small = [copy for copy in bucket if sizes[copy] * dtype.itemsize < LARGE_BYTES]
    large = [
        _Message(peer, [copy], sizes[copy], dtype) for copy in bucket if sizes[copy] * dtype.itemsize >= LARGE_BYTES
    ]
    return large + ([_Message(peer, small, sum(map(sizes.get, small)), dtype)] if small else [])


def _needs_no_staging(message: _Message, memory: Tensor) -> bool:
    is_local = memory.device.type == device.device().type  # a mapped file stays on the host
    return len(message.copies) == 1 and memory.dtype == message.dtype and memory.is_contiguous() and is_local


def _into_buckets(copies: list[ShardCopy], bucket_size: int) -> list[list[ShardCopy]]:
    """Fills buckets of at most `bucket_size` elements with the copies, in order; splits large copies."""
    buckets, room = [], 0
    for copy in copies:
        for part in split_copy(copy, bucket_size):
            size = math.prod(part.shape)
            if size > room:
                buckets.append([])
                room = bucket_size
            buckets[-1].append(part)
            room -= size
    return buckets


def _split(buffer: Tensor, copies: list[ShardCopy]) -> list[Tensor]:
    """Splits a flat buffer into one box per copy, in the copy's shape."""
    boxes = buffer.split([math.prod(copy.shape) for copy in copies])
    return [box.view(copy.shape) for box, copy in zip(boxes, copies, strict=True)]


# -- checksums ---------------------------------------------------------------------------------------------------


def checksum(weights: LocalWeights, group, dtypes: dict[str, torch.dtype] | None = None) -> dict[str, int]:
    """Returns a checksum for every key of a model's weights, equal in any layout; a collective of the group.

    The sum, modulo 2^64, of each element's bits times an odd hash of its index in the whole tensor. One changed bit
    always changes it; two swapped elements almost always do. Replicated elements count once; RuntimeError if they have
    different bits.

    Args:
        weights: on this rank.
        dtypes: the weights are converted to these first, by key; None: in their own dtypes.
    """
    totals = {}
    wholes, shards = weights.description()
    for shard in shards:
        whole = wholes[shard.key]
        dtype = whole.dtype if dtypes is None else dtypes[shard.key]
        totals[shard] = _sum_of_shard(weights.view(shard), shard, whole.shape, dtype)
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, {shard: int(total) for shard, total in totals.items()}, group=group)
    return _sum_by_key(gathered)


def _sum_by_key(gathered: list[dict[WeightShard, int]]) -> dict[str, int]:
    distinct, differing = {}, set()
    for totals in gathered:
        for shard, total in totals.items():
            if distinct.setdefault(shard, total) != total:
                differing.add(shard.key)
    if differing:
        raise RuntimeError(f"replicas of the same weights differ: {', '.join(sorted(differing)[:NAMED])}")
    sums = defaultdict(int)
    for shard, total in distinct.items():
        sums[shard.key] = (sums[shard.key] + total) % 2**64
    return dict(sums)


def _sum_of_shard(values: Tensor, shard: WeightShard, whole: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Returns the checksum of a shard of a tensor of shape `whole`, int64 on its device."""
    strides = [math.prod(whole[axis + 1 :]) for axis in range(len(whole))]
    start = sum(map(math.prod, zip(shard.index + shard.offset, strides, strict=True)))
    if not values.dim():
        values, strides = values.reshape(1), [*strides, 1]
    strides = strides[len(strides) - values.dim() :]
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    rows = max(1, ELEMENTS_AT_ONCE // max(1, values[0].numel()))
    for number, chunk in enumerate(values.split(rows)):
        indices = torch.tensor(start + number * rows * strides[0], device=values.device)
        for axis, size in enumerate(chunk.shape):
            indices = indices.unsqueeze(-1) + torch.arange(size, device=values.device) * strides[axis]
        bits = chunk.to(dtype).contiguous().view(INTEGERS[dtype.itemsize])
        total += (_hash(indices).bitwise_or_(1) * bits).sum()
    return total


def _hash(numbers: Tensor) -> Tensor:
    """Hashes int64 numbers with the finalizer of SplitMix64 (Steele, Lea, Flood 2014); overflow is intended."""
    numbers = numbers - 0x61C8864680B583EB
    numbers ^= numbers >> 30
    numbers *= -0x40A7B892E31B1A47
    numbers ^= numbers >> 27
    numbers *= -0x6B2FB644ECCEEE15
    numbers ^= numbers >> 31
    return numbers


# -- the output layer alone --------------------------------------------------------------------------------------

HEAD = "output_layer"


def head_rows(rows: Tensor | None, first: int = 0, total: int = 0) -> LocalWeights:
    """The `rows` [n, H] of an output layer [total, H] from the `first` on; None or no rows: this rank has none."""
    if rows is None or not len(rows):
        return LocalWeights({}, {})
    shard, whole = WeightShard(HEAD, (), (first, 0), tuple(rows.shape)), (total, rows.shape[1])
    return LocalWeights(
        {HEAD: GlobalTensor(whole, rows.dtype)}, {shard: functools.partial(box_view, lambda: rows, (first, 0))}
    )


def output_weight(model) -> Tensor | None:
    """A model's output weight [V/tp, H] on this rank, whether or not it is tied; None without the last stage."""
    last = list(model)[-1]
    last = last.module if hasattr(last, "module") else last
    if not last.post_process:
        return None
    # Megatron's method returns the embedding of a first stage also if the head has a weight of its own.
    is_tied = last.share_embeddings_and_output_weights
    return (last.shared_embedding_or_output_weight() if is_tied else last.output_layer.weight).detach()


class HeadCopy:
    """Rows of a frozen model's output layer [V_T, H_T] on the ranks of another model's last stage.

    `weight`: [V/tp, H_T] there, None elsewhere. Rows that the frozen model does not have are 0; they are beyond the
    vocabulary.
    """

    def __init__(self, frozen, policy, pg_collection, group, dtype: torch.dtype):
        """Plans the copy, and makes it. A collective of the group, which has the ranks of both.

        Args:
            frozen: the frozen model, of `dtype`, on this rank; None on others.
            policy: the other model, of the groups `pg_collection`, on this rank; None on others.
        """
        self._frozen, self.weight = frozen, None
        held, wholes = self._held(), [None] * dist.get_world_size(group)
        dist.all_gather_object(wholes, held.wholes.get(HEAD), group=group)
        total, width = next(whole.shape for whole in wholes if whole is not None)
        own, wanted = None if policy is None else output_weight(policy), head_rows(None)
        if own is not None:
            self.weight = torch.zeros(len(own), width, dtype=dtype, device=device.device())
            first = dist.get_rank(pg_collection.tp) * len(own)
            wanted = head_rows(self.weight[: max(total - first, 0)], first, total)
        self._transfer = WeightTransfer(held, wanted, group)
        self.run()

    def run(self):
        """Copies the present weights. A collective of the group."""
        with contextlib.nullcontext() if self._frozen is None else self._frozen.offload.present("weights"):
            self._transfer.source = self._held()  # an offloaded weight is another tensor each time
            self._transfer.run()

    def _held(self) -> LocalWeights:
        weight = None if self._frozen is None else output_weight(self._frozen.model)
        if weight is None:
            return head_rows(None)
        tp = self._frozen.role_groups.pg_collection.tp
        first = dist.get_rank(tp) * len(weight) + fsdp.range_here(weight).start
        return head_rows(fsdp.rows_here(weight), first, dist.get_world_size(tp) * len(weight))
