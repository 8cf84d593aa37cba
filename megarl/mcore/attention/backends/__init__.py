"""Attention backends, one module each, chosen by `--attention-backend NAME`: a new kernel is a new module here.

A module defines `plan_attention(segments, is_whole, window)` and `packed_attention(query, key, value, plan, scale)` for
training, and for rollout `plan_cache_reads(requests)` and the class `PagedAttention`, a `CacheAttention`; `sdpa`
documents their arguments. If it has `reads_of_table`, too, decode steps are planned on the device
(`inference.device_decode`). Layers do not know which backend runs. Only for models with softcaps or sinks they also
hand over `softcap` and `sinks`. Over latents a `PagedAttention` gets a cache of `Latents`; if the module has
`takes_narrow_values`, values may have other channels than keys there.
`PackedAttention` is the layers' core attention in training, since megatron-core's own does not support packed sequences
and builds the full score matrix.
"""

import importlib
import types
from collections.abc import Mapping
from types import MappingProxyType

import torch
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megarl.mcore import device
from megarl.mcore.attention import native_attention
from megarl.mcore.attention.rotary_embeddings import rotated_heads, split_heads
from megarl.mcore.attention.segments import kind_of_layer
from megarl.mcore.config.model_flags import has_score_options
from megarl.mcore.parallel.context_parallel import gather_for_attention
from megarl.mcore.parallel.process_groups import split_state_dict


def load(config) -> types.ModuleType:
    """The backend that a model's config names (`megatron_flags.transformer_config` sets it); for `sdpa` the compiled
    kernels, if they compute this model's attention, and `eager` for scores that SDPA does not compute."""
    name = config.attention_kernel
    if name == "sdpa" and native_attention.supports(config):
        return native_attention
    name = "eager" if name == "sdpa" and has_score_options(config) else name
    return importlib.import_module(f"{__name__}.{name}")


class PackedAttention(MegatronModule):
    """Causal grouped-query attention over packed sequences [T, H, D], with any context parallelism."""

    options: Mapping = MappingProxyType({})  # what the backend needs besides the scale

    def __init__(self, config, layer_number, attn_mask_type, attention_type, pg_collection, softmax_scale=None, **_):
        super().__init__(config=config)
        self.softmax_scale = softmax_scale
        self.backend = load(config)
        self.kind = kind_of_layer(config, layer_number)  # of plans for layers with or without a window
        self.skips_rope = bool(config.no_rope_freq and config.no_rope_freq[layer_number - 1])
        self.tp_group = pg_collection.tp  # else checkpointing reads the group from Megatron's global state

    def forward(self, query, key, value, attention_mask, attn_mask_type=None, packed_seq_params=None, **_):
        """query [T, H, D], key, value [T, G, D] of this rank -> [T, H·D]; `packed_seq_params` is a `PackedLayout`."""
        rotation = self._rotation(packed_seq_params)
        if rotation is not None:
            query, key = rotated_heads(query, key, rotation.cosines, rotation.sines)
        return self._attend_gathered(query, key, value, packed_seq_params)

    def of_groups(self, heads: Tensor, layout) -> Tensor:
        """As `forward`, of heads [T, G, R + 2, D] on CUDA: the queries of each group, its key, its value."""
        return self._attend_gathered(*split_heads(heads, *(self._rotation(layout) or (None, None))), layout)

    def _rotation(self, layout):
        return None if layout.rotations is None or self.skips_rope else layout.rotations[self.kind]

    def _attend_gathered(self, query: Tensor, key: Tensor, value: Tensor, layout) -> Tensor:
        if layout.order is not None:
            key_value = gather_for_attention(torch.cat([key, value], dim=1), layout.order, layout.cp_group)
            key, value = key_value.chunk(2, dim=1)
        return self.attend(query, key, value, layout)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layout) -> Tensor:
        """Same as `forward`, with keys and values [T', G, D] of the whole stream."""
        segments = layout.attention[self.kind]
        return self.backend.packed_attention(query, key, value, segments, self.softmax_scale, **self.options).flatten(1)


class ScoredAttention(PackedAttention):
    """The same with a softcap, with sinks, or with both.

    `softmax_offset` [H] are the sinks of this rank's heads, named as in Megatron; with `--softmax-type off-by-one`
    they are 0.
    """

    def __init__(self, config, pg_collection, **kwargs):
        super().__init__(config, pg_collection=pg_collection, **kwargs)
        heads = config.num_attention_heads // pg_collection.tp.size()
        if config.softmax_type == "off-by-one":
            self.register_buffer("softmax_offset", torch.zeros(heads, device=device.device()), persistent=False)
        elif config.softmax_type == "learnable":
            zeros = torch.zeros(heads, dtype=config.params_dtype, device=device.device())
            self.softmax_offset = torch.nn.Parameter(zeros)
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)
        else:
            self.softmax_offset = None

    @property
    def options(self) -> dict:
        """The softcap and the sinks."""
        return {"softcap": self.config.attn_logit_softcapping, "sinks": self.softmax_offset}

    sharded_state_dict = split_state_dict
