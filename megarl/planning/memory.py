"""Memory of a role on the ranks of each pipeline stage, in bytes.

Weights, gradients and optimizer states are exact (`gradient_buffers`); activations and logits are estimates
(`activations`).
"""

import functools
from collections import Counter
from dataclasses import dataclass, fields
from math import ceil

import numpy as np

from megarl.mcore.config.megatron_flags import parallel_sizes
from megarl.mcore.config.optimizer_flags import MUON, SGD, on_host
from megarl.mcore.lora.targets import LoRASettings
from megarl.mcore.model.weight_table import Weight, prediction_weights
from megarl.planning import activations
from megarl.planning.gradient_buffers import buffers, gradient_bytes, gradient_itemsize
from megarl.planning.parameters import (
    CACHED,
    SCALAR_HEAD,
    ModelKey,
    all_factors,
    factors_apart,
    is_half,
    of_stages,
    stage_weights,
    trained_and_frozen,
)

GIB = 2**30


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank. Weights, gradients, optimizer states and KV cache persist; activations and logits do not."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    kv_cache: int = 0
    activations: int = 0
    logits: int = 0
    offloaded: tuple[str, ...] = ()  # fields that are on the device only while the role computes
    # Share of the KV cache in the actor's gradient buffer; it counts as gradients. If these are offloaded, the peak is
    # that of the actor, which loads them, not that of the rollout.
    kv_cache_in_gradients: int = 0
    sent_weights: int = 0  # copies of the actor's on their way to a rollout that generates ahead
    teacher_data: int = 0  # the actor's rows of the teacher's output layer, and hidden states of a step
    # In host memory: the moving average, teachers that wait for their turns, and what the host updates
    # (`--optimizer-cpu-offload`) of states, gradients and weights.
    average: int = 0
    waiting: int = 0
    host_states: int = 0

    @property
    def resident(self) -> int:
        """Bytes that are always on the device."""
        kept = self.weights + self.gradients + self.optimizer + self.kv_cache - self.kv_cache_in_gradients
        kept += self.sent_weights + self.teacher_data
        return kept - sum(getattr(self, name) for name in self.offloaded)

    @property
    def transient(self) -> int:
        """Peak of what is on the device only while the role computes; activations and optimizer states take turns."""
        loaded = {name: getattr(self, name) for name in self.offloaded}
        states = loaded.pop("optimizer", 0)
        return sum(loaded.values()) + max(self.activations + self.logits, states)

    @property
    def host(self) -> int:
        """Bytes of host copies of what is offloaded, gradients apart, which are not kept, and of what is only there."""
        copies = sum(getattr(self, name) for name in self.offloaded if name != "gradients")
        return self.average + self.waiting + self.host_states + copies

    @property
    def total(self) -> int:
        """Peak on the device."""
        return self.resident + self.transient

    def dict(self) -> dict:
        """Every field in bytes, the peak on the device, and the bytes in host memory."""
        sizes = {f.name: getattr(self, f.name) for f in fields(self) if f.type is int}
        return sizes | {"total": self.total, "host": self.host}


def _states(args, itemsize: int, is_of_muon: bool = False) -> int:
    """Optimizer bytes per element: two moments, or the fp32 momentum of SGD or Muon; an fp32 copy of 16-bit weights."""
    if is_of_muon or args.optimizer == SGD:
        moments = 4 if is_of_muon or args.sgd_momentum else 0
    else:
        moments = args.exp_avg_dtype.itemsize + args.exp_avg_sq_dtype.itemsize
    return moments + (4 if is_half(args) and itemsize < 4 else 0)


def _is_of_muon(weight: Weight, args) -> bool:
    """Whether Muon trains a weight: matrices that are no embedding, head or convolution."""
    is_matrix = weight.elements > weight.rows and not weight.name.startswith(("embedding.", "output_layer."))
    return args.optimizer == MUON and is_matrix and not weight.name.endswith("conv1d.weight")


def trained_bytes(weights: list[Weight], args, first_stage: bool) -> tuple[int, int, np.ndarray]:
    """Bytes (weights, gradients, optimizer states [ranks]) of one trainable model chunk."""
    if args.use_torch_fsdp2:
        states = sum(n * _states(args, w.itemsize) for n, w in zip(sharded(weights, args), weights, strict=True))
        return *sharded_bytes(weights, args), np.array([states])
    gradient_buffers = buffers(weights, args, first_stage)
    gradients = sum(gradient_bytes(buffer, args) for buffer in gradient_buffers)
    if args.use_layer_wise_distributed_optimizer:
        return plain_bytes(weights), gradients, _states_of_whole_weights(weights, args)
    if not args.use_distributed_optimizer:
        states = sum(w.elements * _states(args, w.itemsize, _is_of_muon(w, args)) for w in weights)
        return plain_bytes(weights), gradients, np.array([states])
    held, ranks = sum(b.elements * b.itemsize for b in gradient_buffers), max(b.ranks for b in gradient_buffers)
    # Shares of a smaller group, of experts, are repeated.
    by_buffer = [np.repeat(b.shares() * _states(args, b.itemsize), ranks // b.ranks) for b in gradient_buffers]
    return held, gradients, np.sum(by_buffer, axis=0)


def host_part(chunks: list[list[Weight]], args, stage: int) -> tuple[np.ndarray, np.ndarray]:
    """What `--optimizer-cpu-offload` moves of the trained weights of a stage, as of one optimizer: bytes [data-parallel
    ranks] that the device does not have, and that the host has."""
    if not args.optimizer_cpu_offload:
        return np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
    found = [buffer for weights in chunks for buffer in buffers(weights, args, stage == 0)]
    ranks, moments = max(b.ranks for b in found), args.exp_avg_dtype.itemsize + args.exp_avg_sq_dtype.itemsize
    shares = [(np.repeat(b.shares_of_weights(), ranks // b.ranks, axis=0), _states(args, b.itemsize)) for b in found]
    elements, sizes = (np.concatenate(parts, axis=1) for parts in zip(*((n, n * b) for n, b in shares), strict=True))
    chosen = on_host(sizes, args.optimizer_offload_fraction)
    # Beside moments the host has fp32 weights, and fp32 memory for copies.
    return (sizes * chosen).sum(1), (elements * chosen).sum(1) * (moments + 8)


def _states_of_whole_weights(weights: list[Weight], args) -> np.ndarray:
    """[data-parallel ranks] optimizer bytes of each, where each weight has one rank: of Muon's distributed optimizer.

    As Megatron does, the weights of each kind of rank, by size, go to the ranks in turns, there and back.
    """
    sizes = parallel_sizes(args)
    dense, expert = sizes.data(args.world_size) * sizes.context, sizes.expert_data(args.world_size)
    # Vectors and biases, which weight decay leaves out, are last.
    ordered = sorted(
        weights,
        key=lambda w: (not _is_of_muon(w, args), w.elements == w.rows or w.name.endswith(".bias")),
    )
    shares = []
    for is_expert, ranks in ((False, dense), (True, expert)):
        members = sorted((w for w in ordered if w.is_expert == is_expert), key=lambda w: w.elements)
        there_and_back, own = [*range(ranks), *reversed(range(ranks))], np.zeros(ranks, dtype=np.int64)
        for number, weight in enumerate(members):
            states = _states(args, weight.itemsize, _is_of_muon(weight, args))
            own[there_and_back[number % (2 * ranks)]] += weight.elements * states
        shares += [own] if members else []
    ranks = max(map(len, shares))
    return np.sum([np.repeat(own, ranks // len(own)) for own in shares], axis=0)


def plain_bytes(weights: list[Weight]) -> int:
    """Bytes of weights without padding or sharding."""
    return sum(w.elements * w.itemsize for w in weights)


def sharded(weights: list[Weight], args) -> list[int]:
    """Elements of each weight on the first FSDP rank, which has the most: weights are sharded by rows unless
    `is_unsharded`."""
    sizes = parallel_sizes(args)
    ranks = sizes.data(args.world_size) * sizes.context
    return [w.elements if is_unsharded(w, args) else -(-w.rows // ranks) * (w.elements // w.rows) for w in weights]


def is_unsharded(weight: Weight, args) -> bool:
    """Whether each FSDP rank has the whole weight: of another type than its layer, or of several layers."""
    return weight.itemsize != args.params_dtype.itemsize or len(weight.layers) > 1


def sharded_bytes(weights: list[Weight], args) -> tuple[int, int]:
    """Bytes (weights, gradients) of the first FSDP rank."""
    held = list(zip(sharded(weights, args), weights, strict=True))
    return sum(n * w.itemsize for n, w in held), sum(n * gradient_itemsize(args, w.itemsize) for n, w in held)


def stage_memory(role, vocab_size: int, kind: str, tokens: int, microbatches: int, kv_cache: int) -> list[Memory]:
    """Memory of a role on the ranks of each of its pipeline stages; the largest, if the ranks of a stage differ.

    Args:
        role: its RoleSettings; one that runs on another's model has no weights of its own.
        kind: 'train', 'value' (trains a model with a scalar head), 'score' (forward only), 'reward model' (forward
            only, with a scalar head), 'generate' (rollout) or 'judge' (generates, too).
        tokens: maximum per forward.
        microbatches: of an update, on each data-parallel replica.
        kv_cache: bytes of the rollout's or the judge's KV cache on these ranks.
    """
    # Weights used for generation, the actor's and the rollout's, are not offloaded.
    offloaded = (() if kind == "train" else ("weights",)) + ("gradients", "optimizer")
    args, offloaded = role.megatron, offloaded if role.offload and kind != "generate" else ()
    memories, stages = [], stage_weights(args, vocab_size, kind in SCALAR_HEAD)
    key, largest = ModelKey.of(args), [0] * len(stages)
    if role.model_role == role.name:
        held = _persistent_of_stages(key, vocab_size, kind, role.lora)
    else:
        held, largest = [(0, 0, 0, 0)] * len(stages), _largest_buffers(key, vocab_size, kind, role.lora)
    for stage, chunks in enumerate(stages):
        activation = activations.of_stage(args, stage, kind, tokens, microbatches)
        logits = activations.of_logits(args, vocab_size, kind, tokens) if stage == len(stages) - 1 else 0
        if args.use_torch_fsdp2:
            activation += gathered(chunks)
            activation += sum(plain_bytes(all_factors(weights, args, role.lora)) for weights in chunks)
        weights, gradients, optimizer, host = held[stage]
        shared = min(kv_cache, largest[stage])
        memory = Memory(
            weights, gradients, optimizer, kv_cache, activation, logits, offloaded, shared, host_states=host
        )
        memories.append(memory)
    return memories


@functools.lru_cache(maxsize=CACHED)
def _persistent_of_stages(
    model: ModelKey, vocab_size: int, kind: str, lora: LoRASettings | None
) -> list[tuple[int, int, int, int]]:
    """`_persistent` of each stage."""
    stages = stage_weights(model.args, vocab_size, kind in SCALAR_HEAD)
    return of_stages(stages, lambda chunks, stage: _persistent(chunks, model.args, kind, stage, lora))


@functools.lru_cache(maxsize=CACHED)
def _largest_buffers(model: ModelKey, vocab_size: int, kind: str, lora: LoRASettings | None) -> list[int]:
    """Bytes of the largest gradient buffer of each stage; 0 under FSDP, which has none."""
    args, stages = model.args, stage_weights(model.args, vocab_size, kind in SCALAR_HEAD)
    if args.use_torch_fsdp2:
        return [0] * len(stages)

    def largest(chunks: list[list[Weight]], stage: int) -> int:
        trained = [trained_and_frozen(weights, args, lora, value_head=False)[0] for weights in chunks]
        return max(gradient_bytes(buffer, args) for weights in trained for buffer in buffers(weights, args, stage == 0))

    return of_stages(stages, largest)


def _persistent(
    chunks: list[list[Weight]], args, kind: str, stage: int, lora: LoRASettings | None
) -> tuple[int, int, int, int]:
    """Bytes of weights, gradients and optimizer states of a stage's fullest rank, and of states on the host."""
    predicts = prediction_weights(args, parallel_sizes(args))
    if kind in ("train", "value"):
        parts = [trained_and_frozen(weights, args, lora, kind in SCALAR_HEAD) for weights in chunks]
        sizes = [trained_bytes(trained, args, stage == 0) for trained, _ in parts]
        moved = [host_part([trained for trained, _ in parts], args, stage)]
        frozen_bytes = sum(_held(frozen, args) for _, frozen in parts)
        if predicts and args.trains_prediction:
            sizes.append(trained_bytes(predicts, args, False))  # reduced after its backward
            moved.append(host_part([predicts], args, stage=1))
        else:
            frozen_bytes += plain_bytes(predicts)
        return (
            sum(s[0] for s in sizes) + frozen_bytes,
            sum(s[1] for s in sizes),
            int(np.max(sum(s[2] for s in sizes) - sum(device for device, _ in moved))),
            int(np.max(sum(host for _, host in moved))),
        )
    # A rollout's own model has the factors, too.
    own = sum(_held(weights + factors_apart(weights, args, lora), args) for weights in chunks)
    return own + plain_bytes(predicts), 0, 0, 0


def checkpoint_bytes(role, vocab_size: int, ranks: int, average: bool) -> int:
    """What so many of a role's ranks write of its checkpoint, at most: those of one node.

    A replica writes the weights, and the states unless they are divided among data-parallel ranks.

    Args:
        role: one that is trained.
        average: whether its checkpoint has a moving average, which counts as a state.
    """
    args, sizes, value_head = role.megatron, parallel_sizes(role.megatron), role.has_scalar_head
    of_state = args.exp_avg_dtype.itemsize + args.exp_avg_sq_dtype.itemsize + 4 + 4 * average
    are_divided = args.use_distributed_optimizer or args.use_torch_fsdp2
    # Of a weight, by whether it is an expert's.
    shards = {False: sizes.tensor, True: sizes.expert * sizes.expert_tensor}
    of_stage = len(role.ranks) // sizes.pipeline  # ranks
    share, whole, fullest = min(1.0, ranks / of_stage), 0.0, 0.0
    for chunks in [*stage_weights(args, vocab_size, value_head), [prediction_weights(args, sizes)]]:
        written = 0.0
        for weight in (w for chunk in chunks for w in _saved(chunk, role, value_head)):
            count = shards[weight.is_expert]
            own, states = weight.elements * weight.itemsize, weight.elements * of_state
            whole += count * (own + states)
            written += share * count * own if args.use_torch_fsdp2 else min(ranks, count) * own
            written += share * count * states if are_divided else min(ranks, count) * states
        fullest = max(fullest, written)
    return ceil(min(whole, fullest * ceil(ranks / of_stage)))


def _saved(weights: list[Weight], role, value_head: bool) -> list[Weight]:
    """The weights of a chunk that a checkpoint has: those that are trained, without factors all."""
    return trained_and_frozen(weights, role.megatron, role.lora, value_head)[0] if role.lora else weights


def average_bytes(role, vocab_size: int, kind: str) -> list[int]:
    """Bytes of the moving average on a rank of each stage, under FSDP on the fullest: four for each trained weight."""
    args, sizes, value_head = role.megatron, [], kind in SCALAR_HEAD
    for chunks in stage_weights(args, vocab_size, value_head):
        trained = [w for weights in chunks for w in trained_and_frozen(weights, args, role.lora, value_head)[0]]
        sizes.append(4 * sum(sharded(trained, args) if args.use_torch_fsdp2 else [w.elements for w in trained]))
    return sizes


def _held(weights: list[Weight], args) -> int:
    """Bytes of weights without gradients on a rank, under FSDP on the fullest."""
    return sharded_bytes(weights, args)[0] if args.use_torch_fsdp2 else plain_bytes(weights)


def gathered(chunks: list[list[Weight]]) -> int:
    """Bytes of FSDP weights gathered at a time: embedding, head, the layer in use and the prefetched one."""
    of_layers = Counter[int | None]()
    for weight in (w for chunk in chunks for w in chunk if len(w.layers) < 2):
        of_layers[weight.layer] += weight.elements * weight.itemsize
    return of_layers.pop(None, 0) + sum(sorted(of_layers.values())[-2:])
