"""Dense families and relatives: Llama, Mistral, Phi, GLM; Gemma, OLMo, EXAONE, with norms after attention and MLP."""

from megarl.mcore.weights.hf.config_flags import (
    GEGLU,
    QK_NORMS,
    QKV_BIASES,
    Flags,
    deepseek_gates,
    dense_then_experts,
    expert_flags,
    flags_of,
    layer_pattern,
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
    QKV_NAMES,
    SANDWICH,
    Family,
    Prediction,
)
from megarl.mcore.weights.hf.mapping import Heads, rows
from megarl.mcore.weights.hf.model_config import ModelConfig


def _llama_flags(config: ModelConfig) -> Flags:
    """Biases in all projections or in none: Megatron has no flag for those of attention alone."""
    biases = config.switch("attention_bias"), config.switch("mlp_bias")
    if biases[0] != biases[1]:
        raise config.error("attention_bias", f"{biases[1]}, the value of mlp_bias")
    found = model_flags(config)
    if all(biases):
        del found["disable-bias-linear"]
    return found


# Llama 2 and 3, SmolLM2, and others of the same architecture (2307.09288, 2407.21783).
LLAMA = Family("llama", LAYERS, _llama_flags)
INTERNLM_3 = LLAMA._replace(model_type="internlm3")
IQUEST_CODER = LLAMA._replace(model_type="iquestcoder")

# AFM: MLPs have squared ReLU without gates.
ARCEE = Family(
    model_type="arcee",
    layers=LAYERS | {"mlp.linear_fc1.weight": rows("mlp.up_proj.weight")},
    flags=flags_of(
        requires(attention_bias=False, mlp_bias=False),
        lambda config: model_flags(config, ("hidden_act", "relu2", {"squared-relu": True})),
    ),
)

# Code World Model (2510.02387): some layers have a window.
CWM = Family("cwm", LAYERS, flags_of(requires(mlp_bias=False), model_flags, window_flags))

# ERNIE 4.5, dense: rotary positions of neighbouring channels.
ERNIE_4_5 = Family(
    model_type="ernie4_5",
    layers=LAYERS | {"self_attention.linear_qkv.weight": Heads(QKV_NAMES, turned_in_pairs=1.0)},
    flags=flags_of(requires(use_bias=False), model_flags),
)

_FUSED_GATES = {"mlp.linear_fc1.weight": rows("mlp.gate_up_proj.weight")}
# Phi-3 and Phi-4 (2404.14219, 2412.08905): one tensor of q, k and v, and one of gate and up. Dropout is off, as in all
# of megarl's models.
PHI_3 = Family(
    model_type="phi3",
    layers=LAYERS | _FUSED_GATES | {"self_attention.linear_qkv.weight": Heads(("self_attn.qkv_proj.weight",))},
    flags=flags_of(model_flags, window_flags),
)

# Biases of queries, keys and values.
SEED_OSS = Family(
    model_type="seed_oss",
    layers=LAYERS,
    flags=flags_of(requires(attention_out_bias=False, mlp_bias=False), model_flags, QKV_BIASES),
)


def _positions(config: ModelConfig) -> Flags:
    """Which layers have no positions: those with 0 in the list."""
    rotates = config.items("no_rope_layers", int, "0 and 1")
    if len(rotates) != config.whole("num_hidden_layers") or not set(rotates) <= {0, 1}:
        raise config.error("no_rope_layers", "0 or 1 for each layer")
    return {} if all(rotates) else {"no-rope-freq": layer_pattern(not each for each in rotates)}


# SmolLM3: every fourth layer has no positions (2501.18795).
SMOLLM_3 = Family(
    model_type="smollm3",
    layers=LAYERS,
    flags=flags_of(requires(attention_bias=False, mlp_bias=False), model_flags, window_flags, _positions),
)


def check_query_scaling(config: ModelConfig):
    """UsageError if a query may be scaled by its position, as transformers does it after a number of tokens."""
    parameters = config.get("rope_parameters")
    if parameters.get("llama_4_scaling_beta"):
        unscaled, why = parameters.get("original_max_position_embeddings"), ", since later queries are scaled"
        config.check_length("rope_parameters", unscaled, f"{why} (llama_4_scaling_beta)")


# 2310.06825
MISTRAL = Family("mistral", LAYERS, flags_of(model_flags, window_flags))
MINISTRAL = MISTRAL._replace(model_type="ministral")
# Ministral 3 and Devstral Small 2: queries far from the beginning are longer.
MINISTRAL_3 = Family("ministral3", LAYERS, flags_of(check_query_scaling, model_flags, window_flags))
# Mistral Small 3.1 and 3.2, Ministral 3, Devstral Small 2, Mistral Small 4, with a vision tower.
MISTRAL_3 = MISTRAL._replace(
    model_type="mistral3", config_type="mistral", multimodal=LLAVA._replace(texts=("ministral3", "mistral4"))
)

ROTATED = 0.5  # of a head's channels


def _check_rotated(config: ModelConfig):
    if (config.get("rope_parameters") or {}).get("partial_rotary_factor") != ROTATED:
        raise config.error("rope_parameters", f"a partial_rotary_factor of {ROTATED} in this family")


# GLM-4-9B (2406.12793): rotary positions of neighbouring channels, half of them; biases in queries, keys, values.
GLM = Family(
    model_type="glm",
    layers=LAYERS
    | _FUSED_GATES
    | {
        f"self_attention.linear_qkv.{x}": Heads(
            tuple(f"self_attn.{y}_proj.{x}" for y in "qkv"), turned_in_pairs=ROTATED
        )
        for x in ("weight", "bias")
    },
    flags=flags_of(_check_rotated, model_flags, QKV_BIASES),
)
# GLM-4-0414 and GLM-Z1: norms after attention and MLP, too.
GLM_4 = GLM._replace(
    model_type="glm4",
    layers=GLM.layers | {name: rows(name) for name in ("post_self_attn_layernorm.weight", "post_mlp_layernorm.weight")},
    flags=flags_of(GLM.flags, {"layernorm-position": "sandwich"}),
)


# -- norms after attention and MLP ---------------------------------------------------------------------------------


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
