"""Families whose experts have sigmoid gates without groups, in names of their own."""

import functools

from megarl.mcore.weights.hf.experts import (
    SIGMOID_GATES,
    check_several,
    dense_then_experts,
    expert_flags,
    gate_factor,
    shared_experts,
)
from megarl.mcore.weights.hf.family import (
    ALL_HEADS_NORMS,
    EXPERT_LAYERS,
    LAYERS,
    QK_NORMS,
    SANDWICH,
    Family,
    Flags,
    Prediction,
    expert_layers,
    flags_of,
    model_flags,
    positions_of_windows,
    requires,
    window_flags,
)
from megarl.mcore.weights.hf.mapping import Heads, rows
from megarl.mcore.weights.hf.model_config import ModelConfig
from megarl.mcore.weights.hf.rotary import rotary_flags


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
