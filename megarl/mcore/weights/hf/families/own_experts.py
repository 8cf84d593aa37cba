"""Families with experts in names of their own: GPT-OSS, and those of sigmoid gates without groups."""

import functools

from megarl.mcore.weights.hf.config_flags import (
    QK_NORMS,
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
    window_flags,
)
from megarl.mcore.weights.hf.family import (
    ALL_HEADS_NORMS,
    ATTENTION,
    EXPERT_LAYERS,
    LAYERS,
    SANDWICH,
    Family,
    Prediction,
    expert_layers,
)
from megarl.mcore.weights.hf.mapping import Heads, StackedExperts, rows
from megarl.mcore.weights.hf.model_config import ModelConfig


def _layer_flags(config: ModelConfig) -> Flags:
    """Those of all families, with biases of all linear layers."""
    found = model_flags(config, ("hidden_act", "silu", {"quick-geglu": True}))
    del found["disable-bias-linear"]
    return found


def _experts(projection: str, count: int = 1) -> StackedExperts:
    return StackedExperts((f"mlp.experts.{projection}",), count, is_transposed=True)


# GPT-OSS (2508.10925): attention sinks, windows in every second layer, experts with biases and clamped gates.
GPT_OSS = Family(
    model_type="gpt_oss",
    layers={
        **ATTENTION,
        "mlp.linear_fc1.layer_norm_weight": LAYERS["mlp.linear_fc1.layer_norm_weight"],
        "mlp.router.weight": rows("mlp.router.weight"),
        "mlp.router.bias": rows("mlp.router.bias"),
        "mlp.experts.experts.linear_fc1.weight": _experts("gate_up_proj", 2),
        "mlp.experts.experts.linear_fc1.bias": _experts("gate_up_proj_bias", 2),
        "mlp.experts.experts.linear_fc2.weight": _experts("down_proj"),
        "mlp.experts.experts.linear_fc2.bias": _experts("down_proj_bias"),
    },
    # Gates are softmaxes over the chosen experts.
    flags=flags_of(
        requires("attention_bias", True),
        requires("swiglu_alpha", 1.702),
        _layer_flags,
        {"softmax-type": "learnable"},
        window_flags,
        lambda config: expert_flags(config, "intermediate_size"),
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
        requires("attention_bias", False), check_several, model_flags, window_flags, positions_of_windows,
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
        requires("attention_bias", False), requires("mlp_bias", False), check_several, model_flags, expert_flags,
        SIGMOID_GATES, shared_experts, dense_then_experts, QK_NORMS, gate_factor("router_scaling_factor"),
    ),
    modules=LAYERS | EXPERT_LAYERS,
    prediction=Prediction(r"model\.layers\.{layer}\..+", {}, ("num_nextn_predict_layers",)),
)  # fmt: skip

# MiniMax-M2: norms of queries and keys over all heads, a rotation of half the channels. Training-time jitter is not
# applied.
MINIMAX_M2 = Family(
    model_type="minimax_m2",
    layers=LAYERS
    | ALL_HEADS_NORMS
    | expert_layers("block_sparse_moe.gate", "block_sparse_moe.experts", "w1", "w3", "w2")
    | {"mlp.router.expert_bias": rows("block_sparse_moe.e_score_correction_bias")},
    flags=flags_of(
        lambda config: model_flags(config, rotary=functools.partial(rotary_flags, rotates_part=True)),
        lambda config: expert_flags(config, "intermediate_size"),
        SIGMOID_GATES,
        {"qk-layernorm-all-heads": True},
    ),
)
