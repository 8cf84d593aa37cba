"""Rollout state of models with multi-latent attention, whose cache holds latents; the context of any model."""

import copy
from collections.abc import Callable

from megatron.core.transformer import MLATransformerConfig
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor

from megarl.mcore.attention.cache_attention import latent_attention
from megarl.mcore.config.recurrent_rules import has_states
from megarl.mcore.inference.cache_size import cached_heads
from megarl.mcore.inference.paged_context import PagedContext
from megarl.mcore.inference.recurrent_context import RecurrentContext
from megarl.mcore.model.recurrent_mixer import RecurrentMixer


class LatentContext(PagedContext):
    """Caches the latent and the shared key of a token, W numbers in each layer and on every tensor-parallel rank."""

    def __init__(self, model_config, inference_config, *args, **kwargs):
        super().__init__(model_config, inference_config, *args, **kwargs)
        self._attend = latent_attention(self._backend)
        heads = model_config.num_attention_heads // inference_config.pg_collection.tp.size()
        width = max(model_config.qk_head_dim + model_config.qk_pos_emb_head_dim, model_config.v_head_dim)
        self._token_bytes = 2 * heads * width * model_config.params_dtype.itemsize

    def _cache_config(self, model_config):
        """Returns a config whose one key and value together have as many channels as a latent."""
        config = copy.copy(super()._cache_config(model_config))
        config.num_query_groups, config.kv_channels = cached_heads(model_config)
        return config

    def _allocate_memory_buffer(self):
        """Allocates [L, blocks, block size, W]."""
        super()._allocate_memory_buffer()
        self.memory_buffer = self.memory_buffer.flatten(3)


def context_of(
    model, config, memory: Callable[[int], Tensor] | None, snapshots: int | None, further_layers: int = 0
) -> PagedContext:
    """Returns the context for a model's kind of attention.

    Args:
        config, memory: of the engine, and its memory, as of `PagedContext`.
        snapshots: as of `RecurrentContext`.
        further_layers: as of `PagedContext`.
    """
    if has_states(model.config):
        mixers = [layer.self_attention for layer in model.decoder.layers]
        states = [isinstance(mixer, RecurrentMixer) for mixer in mixers] + [False] * further_layers
        cache = [isinstance(mixer, SelfAttention) for mixer in mixers] + [True] * further_layers
        return RecurrentContext(model.config, config, memory, has_states=states, has_cache=cache, snapshots=snapshots)
    kind = LatentContext if isinstance(model.config, MLATransformerConfig) else PagedContext
    return kind(model.config, config, memory, further_layers)
