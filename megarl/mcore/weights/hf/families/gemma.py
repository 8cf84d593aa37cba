"""Families of Gemma: GEGLU, norms before and after attention and MLP, windows."""

from megarl.mcore.weights.hf.family import (
    GEGLU,
    LLAVA,
    QK_NORMS,
    SANDWICH,
    Family,
    Flags,
    flags_of,
    model_flags,
    window_flags,
)
from megarl.mcore.weights.hf.model_config import ModelConfig
from megarl.mcore.weights.hf.rotary import rotary_flags, rotary_flags_by_kind


def _gemma_flags(config: ModelConfig, rotary=rotary_flags) -> Flags:
    """GEGLU, zero-centred norms before and after attention and MLP, scaled embeddings, softcaps.

    `rotary`: function for the flags of rotary embeddings.
    """
    config.require("attention_bias", False, None)
    config.require("use_bidirectional_attention", False, None)
    flags = model_flags(config, GEGLU, rotary) | {
        "layernorm-position": "sandwich",
        "apply-layernorm-1p": True,
        "embedding-multiplier": config.whole("hidden_size") ** 0.5,
        "query-pre-attn-scalar": config.number("query_pre_attn_scalar"),
    }
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if config.get(name) is not None:
            flags[name.replace("_", "-")] = config.number(name)
    return flags


# Gemma 2 (2408.00118): windows in every second layer, softcaps.
GEMMA_2 = Family("gemma2", SANDWICH, flags_of(_gemma_flags, window_flags))
# Gemma 3 (2503.19786): norms of heads; five layers with a window and a rotation of their own, one without.
GEMMA_3_TEXT = Family(
    model_type="gemma3_text",
    layers=SANDWICH,
    flags=flags_of(lambda config: _gemma_flags(config, rotary_flags_by_kind), window_flags, QK_NORMS),
)
# With a vision tower.
GEMMA_3 = GEMMA_3_TEXT._replace(model_type="gemma3", config_type="gemma3_text", multimodal=LLAVA)
