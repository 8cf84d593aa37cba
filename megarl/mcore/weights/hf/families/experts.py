"""Families with experts in all layers but the first ones, and attention like Llama's: Mixtral, GPT-OSS, GLM-4.5."""

import functools

from megarl.mcore.weights.hf.config_flags import (
    QK_NORMS,
    QKV_BIASES,
    SIGMOID_GATES,
    Flags,
    check_several,
    dense_then_experts,
    expert_flags,
    flags_of,
    gate_factor,
    model_flags,
    positions_of_windows,
    requires,
    rotary_flags,
    shared_experts,
    sigmoid_gates,
    switched,
    window_flags,
)
from megarl.mcore.weights.hf.family import (
    ALL_HEADS_NORMS,
    ATTENTION,
    EXPERT_LAYERS,
    LAYERS,
    NO_PREDICTION,
    PREDICTION_LAYERS,
    QWEN_VL,
    SANDWICH,
    Family,
    Prediction,
    expert_layers,
)
from megarl.mcore.weights.hf.mapping import Heads, StackedExperts, rows
from megarl.mcore.weights.hf.model_config import ModelConfig


def _experts_of_ffn(config: ModelConfig) -> Flags:
    """Experts have the size that other families give to dense MLPs."""
    return expert_flags(config, "intermediate_size")


_BLOCK_SPARSE = expert_layers("block_sparse_moe.gate", "block_sparse_moe.experts", ("w1", "w3", "w2"))
# Mixtral (2401.04088): gates are a softmax over the chosen experts alone. Training-time jitter is not applied.
MIXTRAL = Family("mixtral", LAYERS | _BLOCK_SPARSE, flags_of(model_flags, window_flags, _experts_of_ffn))
# MiniMax-M2: norms of queries and keys over all heads, a rotation of half the channels. Training-time jitter is not
# applied.
MINIMAX_M2 = Family(
    model_type="minimax_m2",
    layers=LAYERS
    | ALL_HEADS_NORMS
    | _BLOCK_SPARSE
    | {"mlp.router.expert_bias": rows("block_sparse_moe.e_score_correction_bias")},
    flags=flags_of(
        lambda config: model_flags(config, rotary=functools.partial(rotary_flags, rotates_part=True)),
        _experts_of_ffn,
        SIGMOID_GATES,
        {"qk-layernorm-all-heads": True},
    ),
)


def _biased_layer_flags(config: ModelConfig) -> Flags:
    found = model_flags(config, ("hidden_act", "silu", {"quick-geglu": True}))
    del found["disable-bias-linear"]
    return found


def _stacked(projection: str, count: int = 1) -> StackedExperts:
    return StackedExperts((f"mlp.experts.{projection}",), count, is_transposed=True)


# GPT-OSS (2508.10925): attention sinks, windows in every second layer, experts with biases and clamped gates.
GPT_OSS = Family(
    model_type="gpt_oss",
    layers={
        **ATTENTION,
        "mlp.linear_fc1.layer_norm_weight": LAYERS["mlp.linear_fc1.layer_norm_weight"],
        "mlp.router.weight": rows("mlp.router.weight"),
        "mlp.router.bias": rows("mlp.router.bias"),
        "mlp.experts.experts.linear_fc1.weight": _stacked("gate_up_proj", 2),
        "mlp.experts.experts.linear_fc1.bias": _stacked("gate_up_proj_bias", 2),
        "mlp.experts.experts.linear_fc2.weight": _stacked("down_proj"),
        "mlp.experts.experts.linear_fc2.bias": _stacked("down_proj_bias"),
    },
    # Gates are softmaxes over the chosen experts.
    flags=flags_of(
        requires(attention_bias=True, swiglu_alpha=1.702),
        _biased_layer_flags,
        {"softmax-type": "learnable"},
        window_flags,
        _experts_of_ffn,
        {"glu-linear-offset": 1.0},
        lambda config: {"activation-func-clamp-value": config.number("swiglu_limit")},
    ),
)


def _embedding_flags(config: ModelConfig) -> Flags:
    return {"embedding-multiplier": config.whole("hidden_size") ** 0.5} if config.switch("mup_enabled") else {}


# Trinity (AFMoE): gated attention, norms before and after each part, shared experts; layers without a window have no
# positions.
AFMOE = Family(
    model_type="afmoe",
    layers={
        **SANDWICH,
        "self_attention.linear_qkv.weight": Heads(tuple(f"self_attn.{x}_proj.weight" for x in ("q", "gate", "k", "v"))),
        "mlp.linear_fc1.layer_norm_weight": rows("pre_mlp_layernorm.weight"),
        "post_mlp_layernorm.weight": rows("post_mlp_layernorm.weight"),
        **expert_layers("mlp.router.gate"),
        "mlp.router.expert_bias": rows("mlp.expert_bias"),
    },
    flags=flags_of(
        requires(attention_bias=False), check_several, model_flags, window_flags, positions_of_windows,
        {"layernorm-position": "sandwich"}, QK_NORMS, {"attention-output-gate": True}, _embedding_flags, expert_flags,
        SIGMOID_GATES, gate_factor("route_scale"), shared_experts, dense_then_experts,
    ),
)  # fmt: skip

# Hy3: norms of each query and key head, shared experts.
HY_3 = Family(
    model_type="hy_v3",
    layers=LAYERS
    | expert_layers("mlp.router.gate", shared="mlp.shared_mlp")
    | {"mlp.router.expert_bias": rows("mlp.expert_bias")},
    flags=flags_of(
        requires(attention_bias=False, mlp_bias=False), check_several, model_flags, expert_flags, SIGMOID_GATES,
        shared_experts, dense_then_experts, QK_NORMS, gate_factor("router_scaling_factor"),
    ),
    modules=LAYERS | EXPERT_LAYERS,
    prediction=Prediction(r"model\.layers\.{layer}\..+", {}, ("num_nextn_predict_layers",)),
)  # fmt: skip

_SHARED_SIGMOID = flags_of(expert_flags, sigmoid_gates, shared_experts)
# GLM-4.5 and 4.6 (2508.06471): sigmoid gates with a correction bias, shared experts, first layers dense.
GLM_4_MOE = Family(
    model_type="glm4_moe",
    layers=LAYERS | EXPERT_LAYERS,
    flags=flags_of(model_flags, _SHARED_SIGMOID, dense_then_experts, QKV_BIASES, switched("use_qk_norm", QK_NORMS)),
    prediction=PREDICTION_LAYERS,
)
# GLM-4.5V (2507.01006): the rotation of its text in three axes is the plain one.
GLM_4V_MOE = GLM_4_MOE._replace(model_type="glm4v_moe", config_type="glm4v_moe_text", multimodal=QWEN_VL)
# Sarvam 30B: GLM-4.5's layers, with a rotation of all channels, under names of their own.
SARVAM_MOE = GLM_4_MOE._replace(
    model_type="sarvam_moe",
    layers=LAYERS
    | EXPERT_LAYERS
    | {f"self_attention.linear_qkv.{x}": Heads((f"attention.query_key_value.{x}",)) for x in ("weight", "bias")}
    | {
        "self_attention.linear_proj.weight": rows("attention.dense.weight"),
        "self_attention.q_layernorm.weight": rows("attention.query_layernorm.weight"),
        "self_attention.k_layernorm.weight": rows("attention.key_layernorm.weight"),
        "mlp.router.expert_bias": rows("mlp.gate.expert_bias"),
    },
    modules=LAYERS | EXPERT_LAYERS,
    prediction=NO_PREDICTION,
    outer={"model.embed_tokens.weight": "word_embeddings.weight"},
)
# Solar Open: experts in all layers.
SOLAR_OPEN = Family("solar_open", LAYERS | EXPERT_LAYERS, flags_of(model_flags, _SHARED_SIGMOID, QKV_BIASES))
# dots.llm1 (2506.05767): norms of each query and key head.
DOTS_1 = Family(
    model_type="dots1",
    layers=LAYERS | EXPERT_LAYERS,
    flags=flags_of(
        requires(attention_bias=False), model_flags, window_flags, _SHARED_SIGMOID, dense_then_experts, QK_NORMS
    ),
)
