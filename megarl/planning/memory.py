"""Memory of a role on the ranks of each pipeline stage, in bytes.

Weights, gradients and optimizer states are what the tensors really take (`buffers` follows the rules by which
megatron-core lays gradients out); activations, logits and workspace are estimates (`activations`).
"""

from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np

from megarl.mcore.flags import parallel_sizes
from megarl.planning import activations
from megarl.planning.parameters import SCALAR_HEAD, Weight, is_half, stage_weights

GIB = 2**30
ALIGNMENT, BUCKET_ALIGNMENT = 64, 128  # elements to which the distributed optimizer pads weights and buckets
LEAST_BUCKET, BUCKET_PER_LANE = 40_000_000, 1_000_000  # elements of a bucket where gradients are reduced early


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank. The first three and the cache stay from step to step, the last two come and go.

    `away` names parts that offload brings to the device for the role's turns alone. `lent`: of the cache, what lies in
    the actor's gradients; where these are away the actor's turn, which brings them, too, takes more than the rollout's.
    """

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    kv_cache: int = 0
    activations: int = 0
    logits: int = 0
    away: tuple[str, ...] = ()
    lent: int = 0

    @property
    def resident(self) -> int:
        """What is there all the time."""
        kept = self.weights + self.gradients + self.optimizer + self.kv_cache - self.lent
        return kept - sum(getattr(self, part) for part in self.away)

    @property
    def transient(self) -> int:
        """Most of what exists while the role computes: an optimizer that was away comes once activations are gone."""
        coming = {part: getattr(self, part) for part in self.away}
        states = coming.pop("optimizer", 0)
        return sum(coming.values()) + max(self.activations + self.logits, states)

    @property
    def host(self) -> int:
        """Bytes that wait on the host; gradients are dead between updates."""
        return sum(getattr(self, part) for part in self.away if part != "gradients")

    @property
    def total(self) -> int:
        """Most that is on the device."""
        return self.resident + self.transient

    def dict(self) -> dict:
        """Every part, what is on the device at most, and what waits on the host."""
        parts = {f.name: getattr(self, f.name) for f in fields(self) if f.type is int}
        return parts | {"total": self.total, "host": self.host}


class Buffer(NamedTuple):
    """Weights of one kind behind each other: their places, in elements, and the buckets that are reduced together."""

    places: list[tuple[int, int]]
    buckets: list[tuple[int, int]]
    itemsize: int
    ranks: int  # data-parallel ranks that reduce it

    @property
    def elements(self) -> int:
        """With padding."""
        return self.buckets[-1][1]

    def shares(self) -> np.ndarray:
        """[ranks] elements without padding of each rank's share of every bucket."""
        held = np.zeros(self.ranks, dtype=np.int64)
        first, last = np.array(self.places, dtype=np.int64).T
        for start, end in self.buckets:
            edges = np.linspace(start, end, self.ranks + 1, dtype=np.int64)[:, None]
            held += (np.minimum(last, edges[1:]) - np.maximum(first, edges[:-1])).clip(0).sum(1)
        return held


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def buffers(weights: list[Weight], args, first_stage: bool) -> list[Buffer]:
    """Gradient buffers of a chunk: weights in reverse order, apart by dtype and by the ranks that reduce them."""
    sizes, found = parallel_sizes(args), []
    lanes, dense = sizes.data(args.world_size), sizes.data(args.world_size) * sizes.context
    limit = None
    if args.overlap_grad_reduce and first_stage:
        limit = args.ddp_bucket_size or max(LEAST_BUCKET, BUCKET_PER_LANE * lanes)
    for kind in dict.fromkeys((w.itemsize, w.is_expert) for w in weights):
        own = [w for w in weights if (w.itemsize, w.is_expert) == kind]
        ranks = sizes.expert_data(args.world_size) if kind[1] else dense
        found.append(Buffer(*_lay_out(own[::-1], limit, ranks, args), kind[0], ranks))
    return found


def _lay_out(weights: list[Weight], limit: int | None, ranks: int, args):
    pads = args.use_distributed_optimizer
    unit = np.lcm(ranks, BUCKET_ALIGNMENT * (2**9 if args.ddp_pad_buckets_for_high_nccl_busbw else 1)) if pads else 1
    places, buckets, begin, position = [], [], 0, 0
    for weight in weights:
        position = _up(position, ALIGNMENT) if pads else position
        alone = pads and weight.is_shared
        if alone and position > begin:
            begin = position = _up(position, unit)
            buckets.append((buckets[-1][1] if buckets else 0, begin))
        places.append((position, position + weight.elements))
        position += weight.elements
        if alone or limit is not None and position - begin >= limit:
            position = _up(position, unit)
            buckets.append((begin, position))
            begin = position
    if not buckets or position > buckets[-1][1]:
        buckets.append((begin, _up(position, unit)))
    return places, [(int(a), int(b)) for a, b in buckets]


def _states(args, itemsize: int) -> int:
    """Optimizer bytes an element: two fp32 moments, and an fp32 copy of 16-bit weights."""
    return 12 if is_half(args) and itemsize < 4 else 8


def trained_bytes(weights: list[Weight], args, first_stage: bool) -> tuple[int, int, np.ndarray]:
    """(weights, gradients, optimizer states [ranks]) of one chunk that learns, in bytes."""
    in_fp32 = args.accumulate_allreduce_grads_in_fp32
    if args.use_torch_fsdp2:
        states = sum(n * _states(args, w.itemsize) for n, w in zip(sharded(weights, args), weights, strict=True))
        return *sharded_bytes(weights, args), np.array([states])
    parts = buffers(weights, args, first_stage)
    gradients = sum(b.elements * (4 if in_fp32 else b.itemsize) for b in parts)
    if not args.use_distributed_optimizer:
        states = sum(w.elements * _states(args, w.itemsize) for w in weights)
        return plain_bytes(weights), gradients, np.array([states])
    return sum(b.elements * b.itemsize for b in parts), gradients, _all_states(parts, args)


def _all_states(parts: list[Buffer], args) -> np.ndarray:
    """[ranks of a stage, those that have the same once]: data-parallel ranks stand in blocks, as ranks are numbered."""
    most = max(b.ranks for b in parts)
    return sum(np.repeat(b.shares() * _states(args, b.itemsize), most // b.ranks) for b in parts)


def plain_bytes(weights: list[Weight]) -> int:
    """Bytes of weights that nothing pads or splits."""
    return sum(w.elements * w.itemsize for w in weights)


def sharded(weights: list[Weight], args) -> list[int]:
    """Elements of each weight on the first of the ranks that share it by rows: nobody has more."""
    sizes = parallel_sizes(args)
    ranks = sizes.data(args.world_size) * sizes.context
    return [-(-w.rows // ranks) * (w.elements // w.rows) for w in weights]


def sharded_bytes(weights: list[Weight], args) -> tuple[int, int]:
    """Bytes of such a rank's rows of the weights, and of their gradients."""
    held = list(zip(sharded(weights, args), weights, strict=True))
    in_fp32 = args.accumulate_allreduce_grads_in_fp32
    return sum(n * w.itemsize for n, w in held), sum(n * (4 if in_fp32 else w.itemsize) for n, w in held)


def stage_memory(role, vocab_size: int, kind: str, tokens: int, microbatches: int, kv_cache: int) -> list[Memory]:
    """Memory of a role on the ranks of each of its pipeline stages; of ranks that differ, the largest.

    Args:
        role: its RoleSettings; a role that another hosts has that one's weights, and none of its own.
        kind: 'train', 'value' (trains a scalar head), 'score' (forward alone), 'judge' (that with a scalar head) or
            'write' (rollout).
        tokens: most that go through the model at a time.
        microbatches: of an update, on each lane.
        kv_cache: bytes of the rollout's cache on these ranks.
    """
    args, away = role.megatron, _away(role, kind)
    found, stages = [], stage_weights(args, vocab_size, kind in SCALAR_HEAD)
    for stage, chunks in enumerate(stages):
        moving = activations.of_stage(args, stage, kind, tokens, microbatches)
        logits = activations.of_logits(args, vocab_size, kind, tokens) if stage == len(stages) - 1 else 0
        if args.use_torch_fsdp2:
            moving += gathered(chunks)
        fixed = _fixed(chunks, args, kind, stage) if role.host == role.name else (0, 0, 0)
        lent = min(kv_cache, _largest_buffer(chunks, args, stage)) if role.host != role.name else 0
        found.append(Memory(*fixed, kv_cache, moving, logits, away, lent))
    return found


def _largest_buffer(chunks: list[list[Weight]], args, stage: int) -> int:
    """Bytes of the largest gradient buffer of a stage; sharded gradients have none."""
    if args.use_torch_fsdp2:
        return 0
    parts = [buffer for weights in chunks for buffer in buffers(weights, args, stage == 0)]
    return max(part.elements * (4 if args.accumulate_allreduce_grads_in_fp32 else part.itemsize) for part in parts)


def _away(role, kind: str) -> tuple[str, ...]:
    """Parts that offload moves: all but the weights that write, the actor's and a rollout's."""
    if not role.offload or kind == "write":
        return ()
    return ("gradients", "optimizer") if kind == "train" else ("weights", "gradients", "optimizer")


def _fixed(chunks: list[list[Weight]], args, kind: str, stage: int) -> tuple[int, int, int]:
    """Bytes of weights, gradients and optimizer states of a stage's fullest rank."""
    if kind in ("train", "value"):
        parts = [trained_bytes(weights, args, stage == 0) for weights in chunks]
        return sum(p[0] for p in parts), sum(p[1] for p in parts), int(np.max(sum(p[2] for p in parts)))
    if args.use_torch_fsdp2:
        return sum(sharded_bytes(weights, args)[0] for weights in chunks), 0, 0
    return sum(plain_bytes(weights) for weights in chunks), 0, 0


def gathered(chunks: list[list[Weight]]) -> int:
    """Bytes of sharded weights that are whole at a time: embedding and head, one layer in use and one on its way."""
    layers, rest = {}, 0
    for weight in (w for chunk in chunks for w in chunk):
        if weight.name.startswith("decoder.layers."):
            number = weight.name.split(".")[2]
            layers[number] = layers.get(number, 0) + weight.elements * weight.itemsize
        else:
            rest += weight.elements * weight.itemsize
    return rest + sum(sorted(layers.values())[-2:])
