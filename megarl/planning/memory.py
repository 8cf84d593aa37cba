"""Memory of a role on the ranks of each pipeline stage, in bytes.

Weights, gradients and optimizer states are what the tensors really take (`buffers` follows the rules by which
megatron-core lays gradients out); activations, logits and workspace are estimates (`activations`).
"""

from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np

from megarl.mcore.config.megatron_flags import parallel_sizes
from megarl.planning import activations
from megarl.planning.parameters import SCALAR_HEAD, Weight, is_half, stage_weights

GIB = 2**30
ALIGNMENT, BUCKET_ALIGNMENT = 64, 128  # elements to which the distributed optimizer pads weights and buckets
LEAST_BUCKET, BUCKET_PER_REPLICA = 40_000_000, 1_000_000  # elements of a bucket with --overlap-grad-reduce


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank. Weights, gradients, optimizer states and KV cache persist; activations and logits do not.

    `offloaded` names the parts that are on the device only while the role computes. `kv_cache_in_gradients` is what of
    the KV cache lies in the actor's gradient buffer; it is counted with the gradients. Where the gradients are
    offloaded, the actor, which brings them back, needs more than the rollout.
    """

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    kv_cache: int = 0
    activations: int = 0
    logits: int = 0
    offloaded: tuple[str, ...] = ()
    kv_cache_in_gradients: int = 0

    @property
    def resident(self) -> int:
        """Bytes that are on the device all the time."""
        kept = self.weights + self.gradients + self.optimizer + self.kv_cache - self.kv_cache_in_gradients
        return kept - sum(getattr(self, part) for part in self.offloaded)

    @property
    def transient(self) -> int:
        """Peak of what is there only while the role computes; offloaded optimizer states come after the activations."""
        loaded = {part: getattr(self, part) for part in self.offloaded}
        states = loaded.pop("optimizer", 0)
        return sum(loaded.values()) + max(self.activations + self.logits, states)

    @property
    def model_role(self) -> int:
        """Bytes of offloaded parts in host memory; gradients are not kept between updates."""
        return sum(getattr(self, part) for part in self.offloaded if part != "gradients")

    @property
    def total(self) -> int:
        """Peak on the device."""
        return self.resident + self.transient

    def dict(self) -> dict:
        """Every part, the peak on the device, and what is in host memory."""
        parts = {f.name: getattr(self, f.name) for f in fields(self) if f.type is int}
        return parts | {"total": self.total, "host": self.model_role}


class GradientBuffer(NamedTuple):
    """Weights of one dtype and group, one after the other: [start, end) of each and of each bucket, in elements."""

    spans: list[tuple[int, int]]
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
        first, last = np.array(self.spans, dtype=np.int64).T
        for start, end in self.buckets:
            edges = np.linspace(start, end, self.ranks + 1, dtype=np.int64)[:, None]
            held += (np.minimum(last, edges[1:]) - np.maximum(first, edges[:-1])).clip(0).sum(1)
        return held


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def buffers(weights: list[Weight], args, first_stage: bool) -> list[GradientBuffer]:
    """Gradient buffers of a model chunk: weights in reverse order, one buffer for each dtype and reducing group."""
    sizes, found = parallel_sizes(args), []
    replicas, dense = sizes.data(args.world_size), sizes.data(args.world_size) * sizes.context
    limit = None
    if args.overlap_grad_reduce and first_stage:
        limit = args.ddp_bucket_size or max(LEAST_BUCKET, BUCKET_PER_REPLICA * replicas)
    for kind in dict.fromkeys((w.itemsize, w.is_expert) for w in weights):
        own = [w for w in weights if (w.itemsize, w.is_expert) == kind]
        ranks = sizes.expert_data(args.world_size) if kind[1] else dense
        found.append(GradientBuffer(*_lay_out(own[::-1], limit, ranks, args), kind[0], ranks))
    return found


def _lay_out(weights: list[Weight], limit: int | None, ranks: int, args):
    pads = args.use_distributed_optimizer
    unit = np.lcm(ranks, BUCKET_ALIGNMENT * (2**9 if args.ddp_pad_buckets_for_high_nccl_busbw else 1)) if pads else 1
    spans, buckets, begin, position = [], [], 0, 0
    for weight in weights:
        position = _up(position, ALIGNMENT) if pads else position
        alone = pads and weight.is_shared
        if alone and position > begin:
            begin = position = _up(position, unit)
            buckets.append((buckets[-1][1] if buckets else 0, begin))
        spans.append((position, position + weight.elements))
        position += weight.elements
        if alone or limit is not None and position - begin >= limit:
            position = _up(position, unit)
            buckets.append((begin, position))
            begin = position
    if not buckets or position > buckets[-1][1]:
        buckets.append((begin, _up(position, unit)))
    return spans, [(int(a), int(b)) for a, b in buckets]


def _states(args, itemsize: int) -> int:
    """Optimizer bytes an element: two fp32 moments, and an fp32 copy of 16-bit weights."""
    return 12 if is_half(args) and itemsize < 4 else 8


def trained_bytes(weights: list[Weight], args, first_stage: bool) -> tuple[int, int, np.ndarray]:
    """(weights, gradients, optimizer states [ranks]) of one model chunk that is trained, in bytes."""
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


def _all_states(parts: list[GradientBuffer], args) -> np.ndarray:
    """[data-parallel ranks] optimizer bytes of each; ranks of a smaller (expert) group repeat in blocks."""
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
        kind: 'train', 'value' (trains a model with a scalar head), 'score' (forward only), 'reward model' (forward
            only, with a scalar head) or 'generate' (rollout).
        tokens: most that go through the model at a time.
        microbatches: of an update, on each data-parallel replica.
        kv_cache: bytes of the rollout's KV cache on these ranks.
    """
    args, offloaded = role.megatron, _offloaded(role, kind)
    found, stages = [], stage_weights(args, vocab_size, kind in SCALAR_HEAD)
    for stage, chunks in enumerate(stages):
        held = activations.of_stage(args, stage, kind, tokens, microbatches)
        logits = activations.of_logits(args, vocab_size, kind, tokens) if stage == len(stages) - 1 else 0
        if args.use_torch_fsdp2:
            held += gathered(chunks)
        persistent = _persistent(chunks, args, kind, stage) if role.model_role == role.name else (0, 0, 0)
        shared = min(kv_cache, _largest_buffer(chunks, args, stage)) if role.model_role != role.name else 0
        found.append(Memory(*persistent, kv_cache, held, logits, offloaded, shared))
    return found


def _largest_buffer(chunks: list[list[Weight]], args, stage: int) -> int:
    """Bytes of the largest gradient buffer of a stage; sharded gradients have none."""
    if args.use_torch_fsdp2:
        return 0
    parts = [buffer for weights in chunks for buffer in buffers(weights, args, stage == 0)]
    return max(part.elements * (4 if args.accumulate_allreduce_grads_in_fp32 else part.itemsize) for part in parts)


def _offloaded(role, kind: str) -> tuple[str, ...]:
    """Parts that offload moves: all but the weights that generate, which are the actor's and a rollout's."""
    if not role.offload or kind == "generate":
        return ()
    return ("gradients", "optimizer") if kind == "train" else ("weights", "gradients", "optimizer")


def _persistent(chunks: list[list[Weight]], args, kind: str, stage: int) -> tuple[int, int, int]:
    """Bytes of weights, gradients and optimizer states of a stage's fullest rank."""
    if kind in ("train", "value"):
        parts = [trained_bytes(weights, args, stage == 0) for weights in chunks]
        return sum(p[0] for p in parts), sum(p[1] for p in parts), int(np.max(sum(p[2] for p in parts)))
    if args.use_torch_fsdp2:
        return sum(sharded_bytes(weights, args)[0] for weights in chunks), 0, 0
    return sum(plain_bytes(weights) for weights in chunks), 0, 0


def gathered(chunks: list[list[Weight]]) -> int:
    """Bytes of sharded weights that are gathered at a time: embedding, head, a layer in use and one prefetched."""
    layers, rest = {}, 0
    for weight in (w for chunk in chunks for w in chunk):
        if weight.name.startswith("decoder.layers."):
            number = weight.name.split(".")[2]
            layers[number] = layers.get(number, 0) + weight.elements * weight.itemsize
        else:
            rest += weight.elements * weight.itemsize
    return rest + sum(sorted(layers.values())[-2:])
