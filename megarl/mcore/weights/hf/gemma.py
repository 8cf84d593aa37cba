"""What the Gemma families share."""

from megarl.mcore.weights.hf.family import GEGLU, model_flags
from megarl.mcore.weights.hf.model_config import ModelConfig
from megarl.mcore.weights.hf.rotary import rotary_flags


def gemma_flags(config: ModelConfig, rotary=rotary_flags) -> dict[str, object]:
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
