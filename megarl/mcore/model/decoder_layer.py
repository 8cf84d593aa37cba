"""Transformer layers with a fast path for the rollout engine.

Everything that depends only on the step is computed once, in a `StepPlan` that all layers share: rotary embeddings,
cache slots of the new keys and values, and which keys each token reads. The layers use no dropout and no masks, and
never wait for the device. The results equal those of the training forward to the last bit.
Shapes: T tokens of the step, G key/value groups of R query heads each, D channels per head.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer, get_transformer_layer_offset
from megatron.core.utils import make_viewless_tensor
from torch import Tensor

from megarl.mcore.attention.cache_attention import PrefillDedup
from megarl.mcore.attention.rotary_embeddings import Rotation
from megarl.mcore.kernels.batch_invariance import sigmoid
from megarl.mcore.kernels.linear import apply_linear
from megarl.mcore.kernels.norm import AllHeadsRMSNorm, add_normed, build_norm
from megarl.mcore.model.projections import HeadLayout
from megarl.mcore.model.shared_groups import SharedGroup
from megarl.mcore.moe.layer import MixtureLayer
from megarl.mcore.recurrence import AnyInputs
from megarl.mcore.recurrence.runs import AnyRuns, States
from megarl.mcore.vision.store import ImageRows


@dataclass(frozen=True)
class StepPlan:
    """Metadata of one engine step, shared by all layers."""

    slot_mapping: Tensor  # [T] int64 rows of the flattened caches for the new keys and values
    dedup: PrefillDedup | None  # duplicate prompts, computed once; on the device; None: no duplicates
    # Of the tokens that are computed, by kind of layer, of `attention.segments`; None without rotary embeddings.
    rotations: tuple[Rotation, Rotation] | None
    reads: tuple  # of the KV cache, by the attention backend; by kind of layer, of `attention.segments`
    # Of each layer of this rank: [blocks, block, G, 2, D] keys and values, or [blocks, block, W] latents.
    caches: tuple[Tensor, ...]
    attend: Callable[..., Tensor]  # the attention backend's `PagedAttention`
    is_on_device: bool = False  # the device planned it: 16-bit decodes on CUDA
    runs: AnyRuns | None = None  # of the rows, in models with recurrent states
    states: tuple[States | None, ...] = ()  # of each layer of this rank; None of those with attention
    # What the rows give to the states, by layer; if some rows may be dropped, the states take them after the step.
    drafted: dict[int, AnyInputs] | None = None
    key_reads: list = field(default_factory=list)  # a `KeyReads` in models whose queries choose keys
    images: ImageRows | None = None  # of the tokens that are computed, if layers add features to them

    def store(self, heads: Tensor, rotation: Rotation | None, cache: Tensor):
        """Rotates heads [T, G, R + 2, D] in place, of which the last two are keys and values, and writes these two to
        the step's slots of a layer's cache [slots, G, 2, D]."""
        if self.is_on_device:
            from megarl.mcore.kernels.cuda.rotate_heads import rotate_and_store  # needs Triton

            return rotate_and_store(heads, *(rotation or (None, None)), cache, self.slot_mapping)
        if rotation is not None:
            rotation.apply_(heads[:, :, :-1])
        kv = heads[:, :, -2:] if self.dedup is None else heads[:, :, -2:].index_select(0, self.dedup.inverse)
        cache.index_copy_(0, self.slot_mapping, kv)


def local_layer(attention) -> int:
    """Returns the index of a layer, given its attention or what it has instead, among this rank's layers."""
    stage = dist.get_rank(attention.pg_collection.pp)
    return attention.layer_number - get_transformer_layer_offset(attention.config, pp_rank=stage) - 1


def grouped_heads(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Queries [T, 1, heads, D], keys and values [T, 1, G, D] -> [T, G, R + 2, D] as of `StepPlan.store`."""
    grouped = query.unflatten(2, (key.shape[2], -1))
    return torch.cat([grouped, key.unsqueeze(3), value.unsqueeze(3)], dim=3).squeeze(1)


class PagedSelfAttention(SelfAttention):
    """Megatron's self-attention; in rollout it attends over the engine's KV cache."""

    def __init__(self, config, **kwargs):
        super().__init__(config, **kwargs)
        has_shared_group = config.num_query_groups < self.world_size
        self.shared_group = SharedGroup(HeadLayout.of_config(config), self.tp_group) if has_shared_group else None
        self._has_plain_heads = self.q_layernorm is None and not config.attention_output_gate

    def forward(
        self, hidden, attention_mask, inference_context=None, rotary_pos_emb=None, packed_seq_params=None, **kw
    ):
        """Same as Megatron's; `inference_context` is a `megarl.mcore.inference.paged_context.PagedContext`,
        `packed_seq_params` a `PackedLayout`, by which the core attention rotates queries and keys."""
        if inference_context is not None:
            return self.step(hidden, inference_context.plan(rotary_pos_emb))
        if self.checkpoint_core_attention and self.training:
            return super().forward(hidden, attention_mask, packed_seq_params=packed_seq_params, **kw)
        if self._has_plain_heads and hidden.is_cuda:
            attended = self.core_attention.of_groups(self._projected_heads(hidden), packed_seq_params)
            return apply_linear(self.linear_proj, attended.unsqueeze(1))
        has_gate = self.config.attention_output_gate
        heads = self.get_query_key_value_tensors(hidden, None, split_qkv=True, output_gate=has_gate)
        query, key, value, *gates = heads
        attended = self.core_attention(
            query.squeeze(1), key.squeeze(1), value.squeeze(1), None, packed_seq_params=packed_seq_params
        ).unsqueeze(1)
        return apply_linear(self.linear_proj, self._apply_output_gate(attended, gates[0]) if gates else attended)

    _layer = functools.cached_property(local_layer)

    def step(self, hidden: Tensor, plan: StepPlan) -> tuple[Tensor, Tensor | None]:
        """[T, 1, H] (under sequence parallelism, this rank's tokens) -> output of that shape, and a bias to add."""
        (heads, gate), core = self._heads(hidden), self.core_attention
        cache = plan.caches[self._layer]
        skips_rope = self.config.no_rope_freq and self.config.no_rope_freq[self.layer_number - 1]
        rotation = None if plan.rotations is None or skips_rope else plan.rotations[core.kind]
        plan.store(heads, rotation, cache.flatten(0, 1))
        attended = plan.attend(heads[:, :, :-2], cache, plan.reads[core.kind], core.softmax_scale, **core.options)
        attended = attended.unsqueeze(1)
        attended = attended if gate is None else self._apply_output_gate(attended, gate)
        return apply_linear(self.linear_proj, attended)

    def get_query_key_value_tensors(self, hidden_states, key_value_states=None, output_gate: bool = False, **kwargs):
        """Same as Megatron's, which has another way of getting this rank's heads of a group that ranks share."""
        if self.shared_group is None and (output_gate or self.q_layernorm is not None):
            return super().get_query_key_value_tensors(hidden_states, output_gate=output_gate, **kwargs)
        if self.shared_group is None:
            query, key, value = self._projected_heads(hidden_states).unsqueeze(1).tensor_split((-2, -1), dim=3)
            return query.flatten(2, 3), key.squeeze(3), value.squeeze(3)
        heads = self._projected_heads(hidden_states)
        query, key, value = heads[:, :, :-2], heads[:, :, -2:-1], heads[:, :, -1:]  # one group, in place of one batch
        query, *gates = query.chunk(2, 2) if output_gate else (query,)
        query = query if self.q_layernorm is None else self.q_layernorm(query)
        return query, key if self.k_layernorm is None else self.k_layernorm(key), value, *gates

    def _heads(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """[T, G, R + 2, D] in fresh memory: the query heads of each group, then its key, then its value; and the gates
        of the output in models that have them."""
        if self._has_plain_heads:
            return self._projected_heads(hidden), None
        has_gate = self.config.attention_output_gate
        query, key, value, *gates = self.get_query_key_value_tensors(hidden, output_gate=has_gate)
        return grouped_heads(query, key, value), gates[0] if gates else None

    def _projected_heads(self, hidden: Tensor) -> Tensor:
        """The heads of `_heads`, before norms of queries and keys; of a group that ranks share, R are this rank's."""
        projected, _ = apply_linear(self.linear_qkv, hidden)
        projected = projected if self.shared_group is None else self.shared_group.exchange(projected)
        groups, channels = self.num_query_groups_per_partition, self.hidden_size_per_attention_head
        return projected.view(len(projected), groups, -1, channels)

    def _apply_output_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        """A sigmoid of each channel (2505.06708, Qwen3-Next). As Megatron's; a row's result does not depend on its
        place."""
        return (x * sigmoid(gate.reshape(x.shape).float())).to(x.dtype)


class AllHeadsNormAttention(PagedSelfAttention):
    """Self-attention that norms its queries, and its keys, over all heads together."""

    def __init__(self, config, **kwargs):
        super().__init__(config, **kwargs)
        heads, groups = config.num_attention_heads // self.world_size, self.num_query_groups_per_partition
        channels = self.hidden_size_per_attention_head
        self.q_norm = AllHeadsRMSNorm(config, heads, channels, self.tp_group)
        self.k_norm = AllHeadsRMSNorm(config, groups, channels, self.tp_group, self.shared_group)
        self._has_plain_heads = False

    def get_query_key_value_tensors(self, hidden_states, key_value_states=None, **kwargs):
        """Same as Megatron's, with the norms."""
        query, key, value = super().get_query_key_value_tensors(hidden_states, key_value_states, **kwargs)
        return self.q_norm(query), self.k_norm(key), value


class DecoderLayer(TransformerLayer):
    """Megatron's layer with a fast path for the rollout engine; passes the routing of a micro-batch to its router."""

    has_plain_sums = True  # adds outputs to the hidden states as they are
    _next_norm: tuple = (None,)  # that reads its output; in a tuple, as it is not a module of this layer

    def forward(self, hidden_states, inference_context=None, rotary_pos_emb=None, packed_seq_params=None, **kwargs):
        """Returns hidden states and the cross-attention context, which is None; arguments as of Megatron's layer.
        `packed_seq_params` is a `PackedLayout`, None in the engine."""
        routing = None if packed_seq_params is None else packed_seq_params.routing
        with self.mlp.router.routed(routing) if isinstance(self.mlp, MoELayer) else contextlib.nullcontext():
            return self._forward(hidden_states, inference_context, rotary_pos_emb, packed_seq_params, **kwargs)

    def _forward(self, hidden_states, inference_context, rotary_pos_emb, packed_seq_params, **kwargs):
        if inference_context is None and self._is_whole:
            inputs = {"rotary_pos_emb": rotary_pos_emb, "packed_seq_params": packed_seq_params}
            attend = functools.partial(self.self_attention, attention_mask=None, **inputs)
            output = self._compute(hidden_states, attend, lambda x: self.mlp(self.pre_mlp_layernorm(x)))
            # Pipeline stages free what they have sent, which a view would keep.
            return make_viewless_tensor(output, requires_grad=output.requires_grad, keep_graph=True), None
        if inference_context is not None and self.config.mlp_chunks_for_prefill == 1:
            return self.step(hidden_states, inference_context.plan(rotary_pos_emb)), None
        kwargs |= {"rotary_pos_emb": rotary_pos_emb, "packed_seq_params": packed_seq_params}
        return super().forward(hidden_states, inference_context=inference_context, **kwargs)

    def step(self, hidden: Tensor, plan: StepPlan) -> Tensor:
        """Applies attention, and the MLP or experts, to [T, 1, H]; under sequence parallelism, to this rank's tokens.

        Layers of some models have one of the two alone.
        """
        attend, feed_forward = (lambda x: self.self_attention.step(x, plan)), (lambda x: self._feed_forward(x, plan))
        return self._compute(hidden, attend, feed_forward)

    @property
    def _is_whole(self) -> bool:
        """Whether a training forward computes the layer in one piece and keeps what backward needs."""
        recomputes = self.recompute_input_layernorm or self.recompute_pre_mlp_layernorm or self.recompute_mlp
        return self.has_plain_sums and not recomputes and self.config.mlp_chunks_for_training == 1

    def _compute(self, hidden: Tensor, attend: Callable, feed_forward: Callable) -> Tensor:
        """`attend`: normed hidden states -> attention's output, and a bias to add; `feed_forward`: of the hidden states
        after it."""
        has_mlp, (last,) = not isinstance(self.mlp, IdentityOp), self._next_norm
        if not isinstance(self.self_attention, IdentityOp):
            norm = self.pre_mlp_layernorm if has_mlp else last
            hidden = self._add(hidden, *attend(self.input_layernorm(hidden)), norm)
        return self._add(hidden, *feed_forward(hidden), last) if has_mlp else hidden

    @property
    def _first_norm(self):
        return self.pre_mlp_layernorm if isinstance(self.self_attention, IdentityOp) else self.input_layernorm

    def _feed_forward(self, hidden: Tensor, plan: StepPlan) -> tuple[Tensor, Tensor | None]:
        """Output of the MLP or experts, and a bias to add; a step that the device plans has equally many rows on all
        ranks that share experts."""
        apply = self.mlp.step if plan.is_on_device and isinstance(self.mlp, MixtureLayer) else self.mlp
        return apply(self.pre_mlp_layernorm(hidden))

    def _add(self, residual: Tensor, output: Tensor, bias: Tensor | None, norm) -> Tensor:
        return add_normed(residual, output if bias is None else output + bias, norm)


def link_norms(block):
    """Tells each layer of a chunk which norm reads its output."""
    for layer, after in itertools.zip_longest(block.layers, block.layers[1:]):
        if isinstance(layer, DecoderLayer):
            layer._next_norm = (getattr(after, "_first_norm", None) if after is not None else block.final_layernorm,)


class PostNormLayer(DecoderLayer):
    """A layer that norms what attention, and the MLP or experts, add to the hidden states.

    OLMo 2 (2501.00656 §3.2) has only these norms, Gemma 2 (2408.00118 §2) norms before attention and MLP as well; the
    spec says which it has before them.
    """

    has_plain_sums = False

    def __init__(self, config, **kwargs):
        super().__init__(config, **kwargs)
        self.post_self_attn_layernorm = build_norm(config, config.hidden_size, config.layernorm_epsilon)
        self.post_mlp_layernorm = build_norm(config, config.hidden_size, config.layernorm_epsilon)
        self.self_attn_bda, self.mlp_bda = self._attention_bda, self._mlp_bda
        # Megatron enables gradients here even in passes without, which would keep all hidden states.
        self.bias_dropout_add_exec_handler = contextlib.nullcontext

    def step(self, hidden: Tensor, plan: StepPlan) -> Tensor:
        """Same as that of `DecoderLayer`, with the norms."""
        attended = self.self_attention.step(self.input_layernorm(hidden), plan)
        hidden = self._add_normed(self.post_self_attn_layernorm, attended, hidden)
        return self._add_normed(self.post_mlp_layernorm, self._feed_forward(hidden, plan), hidden)

    def _add_normed(
        self, norm: Callable, output_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, *_
    ) -> Tensor:
        output, bias = output_with_bias
        return residual + norm(output if bias is None else output + bias)

    def _attention_bda(self, *_):
        """Megatron's interface: called with two switches, returns what adds a layer's output to the residual."""
        return functools.partial(self._add_normed, self.post_self_attn_layernorm)

    def _mlp_bda(self, *_):
        return functools.partial(self._add_normed, self.post_mlp_layernorm)
