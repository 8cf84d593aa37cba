"""Families of OLMo: norms of queries and keys over all heads."""

from megarl.mcore.weights.hf.experts import expert_flags, softmax_gates
from megarl.mcore.weights.hf.family import (
    ALL_HEADS_NORMS,
    EXPERT_LAYERS,
    LAYERS,
    POST_NORM,
    Family,
    Flags,
    flags_of,
    model_flags,
    requires,
    window_flags,
)
from megarl.mcore.weights.hf.rotary import rotary_flags_by_kind

_LAYERS = POST_NORM | ALL_HEADS_NORMS
_NORMS: Flags = {"layernorm-position": "post", "qk-layernorm-all-heads": True}

# 2501.00656
OLMO_2 = Family("olmo2", _LAYERS, flags_of(requires("attention_bias", False, None), model_flags, _NORMS))
# Three of four layers have a window; YaRN in the others alone.
OLMO_3 = Family(
    model_type="olmo3",
    layers=_LAYERS,
    flags=flags_of(
        requires("attention_bias", False, None),
        lambda config: model_flags(config, rotary=rotary_flags_by_kind),
        window_flags,
        _NORMS,
    ),
)
# 2409.02060: the usual norms; gates are shares of a softmax over all experts.
OLMOE = Family(
    model_type="olmoe",
    layers=LAYERS | ALL_HEADS_NORMS | EXPERT_LAYERS,
    flags=flags_of(
        requires("attention_bias", False),
        requires("clip_qkv", None),
        model_flags,
        lambda config: expert_flags(config, "intermediate_size"),
        softmax_gates,
        {"qk-layernorm-all-heads": True},
    ),
)
