"""The attention function that modules of transformers call: over packed sequences, or over the engine's cache, in which
each call in a pass has a slot.

A module hands over queries, keys and values after norms and rotary embeddings, and what is special about its scores:
scale, softcap, window, sinks. The current `Pass` says where the keys are. A mask, or anything else that a module asks
for, is refused: transformers makes no masks for an attention that it does not know, so one that exists is the module's.

Shapes: T tokens of the pass, H query heads, G key/value groups, D channels of a key, V of a value.
"""

import contextlib
import copy
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionInterface

from megarl.mcore.any_model.rows import installed, replaced
from megarl.mcore.inference.paged_context import PagedContext
from megarl.mcore.inference.recurrent_context import RecurrentContext
from megarl.mcore.kernels.batch_invariance import VECTOR
from megarl.mcore.parallel.context_parallel import gather_for_attention
from megarl.mcore.vision.store import ImageRows

NAME = "megarl"
# What modules pass on that changes no score here: positions are in the rotary embeddings, and attention is causal.
READ_ELSEWHERE = (
    "cache_position cu_seq_lens_k cu_seq_lens_q dropout logits_to_keep max_length_k max_length_q output_attentions "
    "output_hidden_states output_router_logits position_ids return_dict use_cache"
)
UNREAD = set(READ_ELSEWHERE.split())


class Unsupported(Exception):
    """A module asks attention for something that megarl's does not compute; the text says what, for the user."""


class Scores(NamedTuple):
    """What is special about a module's scores."""

    scale: float
    window: int | None  # tokens that a token sees, with itself; None: all before it
    softcap: float | None  # c of scores c·tanh(score/c)
    sinks: Tensor | None  # [H]


class Slot(NamedTuple):
    """One call of the attention function in a pass: its cache, and what its module handed over at the first pass."""

    number: int  # of its cache
    heads: int
    groups: int
    key_channels: int
    value_channels: int
    window: int | None
    has_score_options: bool  # a softcap or sinks

    @property
    def channels(self) -> int:
        """Channels of a head in the cache, where keys and values have one width of whole vectors."""
        return -(-max(self.key_channels, self.value_channels) // VECTOR) * VECTOR


@dataclass
class Pass:
    """One forward pass. Subclasses say where its keys and values are."""

    tokens: int = 0  # rows of the pass that are tokens; those after them fill it up to whole vectors
    calls: Counter = field(default_factory=Counter)  # of each module
    rotations: dict = field(default_factory=dict)  # of `fused.rotation`
    computed: set = field(default_factory=set)  # layers whose part of the pass a layer before them computed
    functions: Sequence = ()  # `recurrence.functions_of` the module
    product: Callable | None = None  # of the model, as `rows.product`; None: as it is installed
    recurrences: int = 0  # that ran so far, in the order of their states
    images: ImageRows | None = None  # among its tokens

    def slot(self, module: nn.Module) -> Slot:
        """The slot of a module's present call. Calls of a recomputed layer begin again at its first slot."""
        slots: list[Slot] = vars(module)["attention_slots"]
        self.calls[module] += 1
        return slots[(self.calls[module] - 1) % len(slots)]

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """query [1, H, T, D], key [1, G, T, D], value [1, G, T, V] -> [1, T, H, V]."""
        slot, rows = self.slot(module), query.shape[2]
        tokens = (x.squeeze(0).transpose(0, 1)[: self.tokens] for x in (query, key, value))
        query, key, value = (_padded(x, slot.channels) for x in tokens)
        options = {"softcap": scores.softcap, "sinks": scores.sinks} if slot.has_score_options else {}
        out = self.attend_tokens(slot, query, key, value, scores.scale, options)
        out = out.view(1, self.tokens, slot.heads, slot.channels)[..., : slot.value_channels]
        out = out if rows == self.tokens else pad(out, (0, 0, 0, 0, 0, rows - self.tokens))
        return out.contiguous()  # some modules view it in another shape

    def attend_tokens(
        self, slot: Slot, query: Tensor, key: Tensor, value: Tensor, scale: float, options: dict
    ) -> Tensor:
        """query [T, H, C], key, value [T, G, C] with the slot's channels C -> [T, H, C] or [T, G, R, C]."""
        raise NotImplementedError

    def recur(self, rule: Any) -> Tensor:
        """What the pass's tokens read by a `recurrence.Recurrence`, [T, …]."""
        raise NotImplementedError

    def next_state(self) -> int:
        """The number of the state of the next recurrence."""
        self.recurrences += 1
        return self.recurrences - 1


@dataclass
class PackedPass(Pass):
    """A pass over packed sequences: training, scoring."""

    layout: Any = None  # `PackedLayout`
    backend: Any = None  # a module of `attention.backends`

    def attend_tokens(self, slot, query, key, value, scale, options):
        plan, order = self.layout.attention[slot.window is not None], self.layout.order
        if order is not None:
            key_value = gather_for_attention(torch.cat([key, value], dim=1), order, self.layout.cp_group)
            key, value = key_value.chunk(2, dim=1)
        return self.backend.packed_attention(
            query.contiguous(), key.contiguous(), value.contiguous(), plan, scale, **options
        )

    def recur(self, rule):
        layout = self.layout
        if layout.order is None:
            return rule.apply(layout.runs)
        # Tokens before a rank's own are on other ranks: each computes all, and keeps its own.
        whole = rule.of_rows(lambda x: gather_for_attention(x, layout.order, layout.cp_group))
        return whole.apply(layout.runs)[layout.token_indices]


@dataclass
class CachePass(Pass):
    """A step of the engine: keys and values go into the cache, and are read there."""

    plan: Any = None  # `StepPlan`

    def attend_tokens(self, slot, query, key, value, scale, options):
        plan, cache = self.plan, self.plan.caches[slot.number]
        kv = torch.stack([key, value], dim=2)
        kv = kv if plan.dedup is None else kv.index_select(0, plan.dedup.inverse)
        cache.flatten(0, 1).index_copy_(0, plan.slot_mapping, kv)
        grouped = query.contiguous().view(len(query), slot.groups, -1, slot.channels)
        return plan.attend(grouped, cache, plan.reads[slot.window is not None], scale, **options)

    def recur(self, rule):
        plan, number = self.plan, self.next_state()
        if plan.drafted is not None:
            plan.drafted[number] = rule
        return rule.apply(plan.runs, plan.states[number])


@dataclass
class FirstPass(Pass):
    """A pass that notes what modules hand over to attention, which returns the values: one slot for each call."""

    found: list[tuple[nn.Module, Slot]] = field(default_factory=list)
    given: tuple = ()  # queries, keys and values of the last call, and their `Scores`
    states: list[tuple[int, ...]] = field(default_factory=list)  # shapes of a sequence's, in the order of the pass

    def recur(self, rule):
        self.states.append(tuple(rule.state_shape))
        return rule.inputs.x.new_zeros(self.tokens, *rule.read_shape)

    def attend(self, module, query, key, value, scores):
        if key.shape[2] != query.shape[2]:
            raise Unsupported(f"{type(module).__name__} attends to {key.shape[2]} keys of {query.shape[2]} tokens")
        has_options = scores.softcap is not None or scores.sinks is not None
        slot = Slot(
            len(self.found), query.shape[1], key.shape[1], query.shape[3], value.shape[3], scores.window, has_options
        )
        self.found.append((module, slot))
        self.given = query, key, value, scores
        return value.repeat_interleave(query.shape[1] // value.shape[1], 1).transpose(1, 2).contiguous()

    def set_slots(self) -> tuple[Slot, ...]:
        """Sets the slots on their modules, and returns them in the order of the pass."""
        for module, _ in self.found:
            vars(module)["attention_slots"] = [slot for owner, slot in self.found if owner is module]
        return tuple(slot for _, slot in self.found)


def _padded(x: Tensor, channels: int) -> Tensor:
    return x if x.shape[-1] == channels else pad(x, (0, channels - x.shape[-1]))


_current: Pass | None = None


def current() -> Pass:
    """The pass that runs."""
    if _current is None:
        raise RuntimeError("a model of transformers runs outside of a pass of megarl")
    return _current


@contextlib.contextmanager
def running(each: Pass) -> Iterator[None]:
    """Context of one forward pass, or of a layer's recomputation in the backward pass."""
    global _current
    before, _current = _current, each
    try:
        with replaced(each.functions), installed(each.product) if each.product else contextlib.nullcontext():
            yield
    finally:
        _current = before


def with_images(embedding, args, embedded: Tensor) -> Tensor:
    """A forward hook of an embedding, whose rows [1, T, H] of images are those of the current pass."""
    if _current is None or (rows := _current.images) is None:
        return embedded
    return embedded.index_copy(1, rows.at, rows.embeddings().unsqueeze(0).to(embedded.dtype))


def attention(module, query, key, value, attention_mask, scaling=None, **others):
    """What modules call whose config names `NAME`, with transformers' arguments. Raises Unsupported."""
    if attention_mask is not None:
        raise Unsupported(f"{type(module).__name__} makes an attention mask of its own")
    if others.pop("is_causal", None) is False or not getattr(module, "is_causal", True):
        raise Unsupported(f"{type(module).__name__} attends to later tokens, too")
    window, softcap, sinks = (others.pop(name, None) for name in ("sliding_window", "softcap", "s_aux"))
    if unknown := sorted(name for name, x in others.items() if x is not None and name not in UNREAD):
        raise Unsupported(f"{type(module).__name__} asks attention for {', '.join(unknown)}")
    scale = query.shape[3] ** -0.5 if scaling is None else float(scaling)
    return current().attend(module, query, key, value, Scores(scale, window, softcap, sinks)), None


AttentionInterface.register(NAME, attention)


# -- the engine's cache ------------------------------------------------------------------------------------------------


def mean_cache(slots: Sequence[Slot], ranks: int) -> tuple[int, int]:
    """Query groups of the whole model and channels whose product is the mean of the slots, as `SlotContext` has them
    on each of so many tensor-parallel ranks."""
    total = sum(slot.groups * slot.channels for slot in slots)
    return ranks, -(-total // (ranks * len(slots))) if slots else VECTOR  # without attention the cache is of no use


class SlotContext(PagedContext):
    """Caches each slot's keys and values of this rank's heads in their own shape."""

    def __init__(self, model_config, inference_config, memory=None):
        """Arguments as of `PagedContext`; the model's slots are `model_config.attention_slots`."""
        self._keep(model_config, inference_config)
        super().__init__(model_config, inference_config, memory)

    def _keep(self, model_config, inference_config):
        self._attention, self._tensor_ranks = model_config.attention_slots, inference_config.pg_collection.tp

    def _cache_config(self, model_config):
        """A config whose layers have as many numbers for a token as the slots together."""
        config, ranks = copy.copy(super()._cache_config(model_config)), dist.get_world_size(self._tensor_ranks)
        whole = [slot._replace(groups=ranks * slot.groups) for slot in self._attention]
        config.num_layers = max(1, len(whole))
        config.num_query_groups, config.kv_channels = mean_cache(whole, ranks)
        return config

    def layer_caches(self) -> tuple[Tensor, ...]:
        """[blocks, block, G, 2, C] of each slot."""
        flat, blocks, start, caches = self.memory_buffer.flatten(), self.memory_buffer.shape[1], 0, []
        for slot in self._attention:
            shape = blocks, self.block_size_tokens, slot.groups, 2, slot.channels
            caches.append(flat[start : start + math.prod(shape)].view(shape))
            start += math.prod(shape)
        return tuple(caches)


class StateSlotContext(SlotContext, RecurrentContext):
    """Also keeps a state of each request for each recurrence of the module, in its own shape."""

    reads_tables = False  # the host plans the runs of a step

    def __init__(self, model_config, inference_config, memory, snapshots: int | None):
        """Arguments as of `RecurrentContext`; the shapes of a sequence's states are `model_config.state_shapes`."""
        self._keep(model_config, inference_config)
        cached = [True] * len(self._attention)
        RecurrentContext.__init__(self, model_config, inference_config, memory, has_cache=cached, snapshots=snapshots)

    def _state_shapes(self, model_config, ranks):
        return [[shape] for shape in model_config.state_shapes]

    def _states_in(self, parts):
        return parts[0]

    def _take(self, inputs, runs, layer):
        inputs.apply(runs, self._states[layer])
