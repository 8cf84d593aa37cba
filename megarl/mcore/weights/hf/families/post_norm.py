"""Families with norms after attention and MLP, and their relatives: Gemma (before them as well), OLMo, EXAONE."""

from megarl.mcore.weights.hf.config_flags import (
    GEGLU,
    QK_NORMS,
    Flags,
    deepseek_gates,
    dense_then_experts,
    expert_flags,
    flags_of,
    model_flags,
    positions_of_windows,
    requires,
    rotary_flags,
    rotary_flags_by_kind,
    shared_experts,
    softmax_gates,
    window_flags,
)
from megarl.mcore.weights.hf.family import (
    ALL_HEADS_NORMS,
    EXPERT_LAYERS,
    LAYERS,
    LLAVA,
    POST_NORM,
    SANDWICH,
    Family,
    Prediction,
)
from megarl.mcore.weights.hf.mapping import rows
from megarl.mcore.weights.hf.model_config import ModelConfig


def _gemma_flags(config: ModelConfig, rotary=rotary_flags) -> Flags:
    """GEGLU, zero-centred norms before and after attention and MLP, scaled embeddings, softcaps.

    `rotary`: function for the flags of rotary embeddings.
    """
    config.require(attention_bias=(False, None), use_bidirectional_attention=(False, None))
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

_OLMO_LAYERS = POST_NORM | ALL_HEADS_NORMS
_OLMO_NORMS: Flags = {"layernorm-position": "post", "qk-layernorm-all-heads": True}

# OLMo 2 (2501.00656): norms after attention and MLP alone, and norms of queries and keys over all heads.
OLMO_2 = Family("olmo2", _OLMO_LAYERS, flags_of(requires(attention_bias=(False, None)), model_flags, _OLMO_NORMS))
# OLMo 3: three of four layers have a window; YaRN in the others alone.
OLMO_3 = Family(
    model_type="olmo3",
    layers=_OLMO_LAYERS,
    flags=flags_of(
        requires(attention_bias=(False, None)),
        lambda config: model_flags(config, rotary=rotary_flags_by_kind),
        window_flags,
        _OLMO_NORMS,
    ),
)
# OLMoE (2409.02060): the usual norms before attention and MLP; gates are shares of a softmax over all experts.
OLMOE = Family(
    model_type="olmoe",
    layers=LAYERS | ALL_HEADS_NORMS | EXPERT_LAYERS,
    flags=flags_of(
        requires(attention_bias=False, clip_qkv=None),
        model_flags,
        lambda config: expert_flags(config, "intermediate_size"),
        softmax_gates,
        {"qk-layernorm-all-heads": True},
    ),
)


def _exaone_positions(config: ModelConfig) -> Flags:
    """In models without windows all layers have positions."""
    return {} if config.get("sliding_window") is None else positions_of_windows(config)


# EXAONE 4 (2507.11407): norms after attention and MLP alone.
EXAONE_4 = Family(
    model_type="exaone4",
    layers=POST_NORM,
    flags=flags_of(model_flags, window_flags, {"layernorm-position": "post"}, QK_NORMS, _exaone_positions),
)

# K-EXAONE (2601.01739): the usual norms, sigmoid gates with a correction bias.
EXAONE_MOE = Family(
    model_type="exaone_moe",
    layers=LAYERS | EXPERT_LAYERS | {"mlp.router.expert_bias": rows("mlp.e_score_correction_bias")},
    flags=flags_of(
        model_flags, window_flags, positions_of_windows, QK_NORMS, expert_flags, deepseek_gates, shared_experts,
        dense_then_experts,
    ),
    prediction=Prediction(r"mtp\..+", {}, ("num_nextn_predict_layers",)),
)  # fmt: skip
