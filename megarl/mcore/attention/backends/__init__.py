"""Attention backends, one module each, chosen by `--attention-backend NAME`: a new kernel is a new module here.

A module defines `plan_attention(segments, is_whole, window)` and `packed_attention(query, key, value, plan, scale)` for
training, and for rollout `plan_cache_reads(requests)` and the class `PagedAttention`, a `CacheAttention`; `sdpa`
documents their arguments. If it has `reads_of_table`, too, decode steps are planned on the device
(`inference.device_decode`). Layers do not know which backend runs. Only for models with softcaps or sinks they also
hand over `softcap` and `sinks`. Over latents a `PagedAttention` gets a cache of `Latents`; if the module has
`takes_narrow_values`, values may have other channels than keys there.
"""

import importlib
import types

from megarl.mcore.attention import native_attention
from megarl.mcore.config.model_flags import has_score_options


def load(config) -> types.ModuleType:
    """The backend that a model's config names (`megatron_flags.transformer_config` sets it); for `sdpa` the compiled
    kernels, if they compute this model's attention, and `eager` for scores that SDPA does not compute."""
    name = config.attention_kernel
    if name == "sdpa" and native_attention.supports(config):
        return native_attention
    name = "eager" if name == "sdpa" and has_score_options(config) else name
    return importlib.import_module(f"{__name__}.{name}")
