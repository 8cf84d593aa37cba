"""What runs inside a step of the rollout engine: layers that do the training forward's work and no more.

Whatever depends on the step alone is computed once, into a `StepPlan` that all layers share: rotations, places of the
new keys in the cache, which keys each token reads. A layer then is what one reads in `DecoderLayer.step`: no dropout, no
masks, no rotations made anew, nothing that waits for the device. Numbers are the training forward's, to the last bit.
Shapes: T tokens of the step, G key/value groups of R query heads each, D channels per head.
"""

import functools
from dataclasses import dataclass

import torch
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megarl.mcore.attention.paged_attention import CacheReads, PagedAttention, PrefillDedup
from megarl.mcore.kernels.linear import apply_linear


@dataclass(frozen=True)
class Rotation:
    """Cosines and sines of positions, [P, 1, 1, r] for the first r channels of a head (2104.09864 §3.4.2)."""

    cosines: Tensor
    sines: Tensor  # negative in the first half, where the second half's channels come

    @classmethod
    def of(cls, frequencies: Tensor, dtype: torch.dtype) -> "Rotation":
        """From Megatron's frequencies [P, 1, 1, r] of all positions."""
        sines = frequencies.sin()
        sines[..., : sines.shape[-1] // 2].neg_()
        return cls(frequencies.cos().to(dtype), sines.to(dtype))

    def at(self, positions: Tensor) -> "Rotation":
        """Those of positions [T]."""
        return Rotation(self.cosines[positions], self.sines[positions])

    def turn_(self, heads: Tensor):
        """Turns [T, G, heads, D] in place; the operations of Megatron's, whose results training has."""
        width = self.cosines.shape[-1]
        turning = heads[..., :width]
        swapped = torch.cat((turning[..., width // 2 :], turning[..., : width // 2]), dim=-1)
        turning.mul_(self.cosines).add_(swapped.mul_(self.sines))


@dataclass(frozen=True)
class StepPlan:
    """What all layers of a step share."""

    places: Tensor  # [T] int64 rows of the flattened caches for the new keys and values
    dedup: PrefillDedup | None  # whose tokens are computed once; on the device; None: all are
    rotation: Rotation | None  # of the tokens that are computed
    reads: CacheReads
    caches: tuple[Tensor, ...]  # [blocks, block, G, 2, D] keys and values of each layer of this rank
    attend: PagedAttention


class PagedSelfAttention(SelfAttention):
    """Megatron's self-attention, which in rollout attends over the engine's cache."""

    def forward(self, hidden_states, attention_mask, *args, inference_context=None, rotary_pos_emb=None, **kwargs):
        """As Megatron's; the engine's context is a `megarl.mcore.inference.paged_context.PagedContext`."""
        if inference_context is not None:
            return self.step(hidden_states, inference_context.plan(rotary_pos_emb))
        return super().forward(hidden_states, attention_mask, *args, rotary_pos_emb=rotary_pos_emb, **kwargs)

    @functools.cached_property
    def _cache(self) -> int:
        """Which of this rank's caches is this layer's."""
        return self.layer_number - self._get_pp_layer_offset_for_inference() - 1

    def step(self, hidden: Tensor, plan: StepPlan) -> tuple[Tensor, Tensor | None]:
        """[T, 1, H], under sequence parallelism this rank's, -> the same, and a bias that is still to be added."""
        heads, cache = self._heads(hidden), plan.caches[self._cache]
        unturned = self.config.no_rope_freq and self.config.no_rope_freq[self.layer_number - 1]
        if plan.rotation is not None and not unturned:
            plan.rotation.turn_(heads[:, :, :-1])
        both = heads[:, :, -2:] if plan.dedup is None else heads[:, :, -2:].index_select(0, plan.dedup.source)
        cache.flatten(0, 1).index_copy_(0, plan.places, both)
        attended = plan.attend(heads[:, :, :-2], cache, plan.reads, self.core_attention.softmax_scale)
        return apply_linear(self.linear_proj, attended.unsqueeze(1))

    def _heads(self, hidden: Tensor) -> Tensor:
        """[T, G, R + 2, D], which nobody else holds: query heads of each group, and behind them its key and value."""
        if self.q_layernorm is not None or self.config.num_query_groups < self.world_size:
            query, key, value = self.get_query_key_value_tensors(hidden)
            grouped = query.unflatten(2, (key.shape[2], -1))
            return torch.cat([grouped, key.unsqueeze(3), value.unsqueeze(3)], dim=3).squeeze(1)
        projected, _ = apply_linear(self.linear_qkv, hidden)
        groups, channels = self.num_query_groups_per_partition, self.hidden_size_per_attention_head
        return projected.view(len(projected), groups, -1, channels)


class DecoderLayer(TransformerLayer):
    """Megatron's layer with a short way for the engine."""

    def forward(self, hidden_states, *args, inference_context=None, rotary_pos_emb=None, **kwargs):
        """As Megatron's layer: hidden states and the context of cross-attention, which is not there."""
        if inference_context is not None and self.config.mlp_chunks_for_prefill == 1:
            return self.step(hidden_states, inference_context.plan(rotary_pos_emb)), None
        return super().forward(
            hidden_states, *args, inference_context=inference_context, rotary_pos_emb=rotary_pos_emb, **kwargs
        )

    def step(self, hidden: Tensor, plan: StepPlan) -> Tensor:
        """[T, 1, H], under sequence parallelism this rank's, through attention and MLP or experts."""
        hidden = self._add(hidden, *self.self_attention.step(self.input_layernorm(hidden), plan))
        return self._add(hidden, *self.mlp(self.pre_mlp_layernorm(hidden)))

    def _add(self, residual: Tensor, change: Tensor, bias: Tensor | None) -> Tensor:
        """Residual + (change + bias), rounded as in training."""
        if self.config.fp32_residual_connection:
            residual, change = residual.float(), change.float()
            bias = bias if bias is None else bias.float()
        return (change if bias is None else change + bias).add_(residual)


class MoEDecoderLayer(DecoderLayer):
    """A layer with experts; it hands the routing of its micro-batch to its router."""

    def forward(self, *args, packed_seq_params=None, **kwargs):
        """As Megatron's layer; `packed_seq_params` is a `PackedLayout`, None in the engine."""
        routing = None if packed_seq_params is None else packed_seq_params.routing
        with self.mlp.router.routed(routing):
            return super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)


def run_decode_layers(block: TransformerBlock, hidden: Tensor | None, context, frequencies: Tensor | None) -> Tensor:
    """[T, 1, H] behind a chunk's layers and the last one's norm.

    Args:
        hidden: the step's embedded tokens; None: the chunk takes what the stage before sent.
        context: the engine's `megarl.mcore.inference.paged_context.PagedContext`.
        frequencies: of all positions, None without rotary embeddings.
    """
    hidden, dedup = hidden if block.pre_process else block.input_tensor, context.plan(frequencies).dedup
    hidden = hidden if dedup is None else hidden.index_select(0, dedup.kept)
    for layer in block.layers:
        hidden, _ = layer(hidden_states=hidden, inference_context=context, rotary_pos_emb=frequencies)
    hidden = hidden if block.final_layernorm is None else block.final_layernorm(hidden)
    return hidden if dedup is None else hidden.index_select(0, dedup.source)
