"""Families of GLM, and families with experts like those of GLM-4.5."""

from megarl.mcore.weights.hf.config_flags import (
    QK_NORMS,
    QKV_BIASES,
    dense_then_experts,
    expert_flags,
    flags_of,
    model_flags,
    requires,
    shared_experts,
    sigmoid_gates,
    switched,
    window_flags,
)
from megarl.mcore.weights.hf.family import (
    EXPERT_LAYERS,
    LAYERS,
    NO_PREDICTION,
    PREDICTION_LAYERS,
    QWEN_VL,
    Family,
)
from megarl.mcore.weights.hf.mapping import Heads, NeighbourHeads, rows
from megarl.mcore.weights.hf.model_config import ModelConfig

ROTATED = 0.5  # of a head's channels


def _check_rotated(config: ModelConfig):
    if (config.get("rope_parameters") or {}).get("partial_rotary_factor") != ROTATED:
        raise config.error("rope_parameters", f"a partial_rotary_factor of {ROTATED} in this family")


# GLM-4-9B (2406.12793): rotary positions of neighbouring channels, half of them; biases in queries, keys, values.
GLM = Family(
    model_type="glm",
    layers=LAYERS
    | {
        f"self_attention.linear_qkv.{name}": NeighbourHeads(tuple(f"self_attn.{x}_proj.{name}" for x in "qkv"), ROTATED)
        for name in ("weight", "bias")
    }
    | {"mlp.linear_fc1.weight": rows("mlp.gate_up_proj.weight")},
    flags=flags_of(_check_rotated, model_flags, QKV_BIASES),
)
# GLM-4-0414 and GLM-Z1: norms after attention and MLP, too.
GLM_4 = GLM._replace(
    model_type="glm4",
    layers=GLM.layers
    | {
        "post_self_attn_layernorm.weight": rows("post_self_attn_layernorm.weight"),
        "post_mlp_layernorm.weight": rows("post_mlp_layernorm.weight"),
    },
    flags=flags_of(GLM.flags, {"layernorm-position": "sandwich"}),
)

# GLM-4.5 and 4.6 (2508.06471): sigmoid gates with a correction bias, shared experts, first layers dense.
GLM_4_MOE = Family(
    model_type="glm4_moe",
    layers=LAYERS | EXPERT_LAYERS,
    flags=flags_of(
        model_flags,
        expert_flags,
        sigmoid_gates,
        shared_experts,
        dense_then_experts,
        QKV_BIASES,
        switched("use_qk_norm", QK_NORMS),
    ),
    prediction=PREDICTION_LAYERS,
)
# GLM-4.5V (2507.01006): the rotation of its text in three axes is the plain one.
GLM_4V_MOE = GLM_4_MOE._replace(model_type="glm4v_moe", config_type="glm4v_moe_text", multimodal=QWEN_VL)
# Sarvam 30B: GLM-4.5's layers, with a rotation of all channels, under names of their own.
SARVAM_MOE = GLM_4_MOE._replace(
    model_type="sarvam_moe",
    layers=LAYERS
    | EXPERT_LAYERS
    | {
        "self_attention.linear_qkv.weight": Heads(("attention.query_key_value.weight",)),
        "self_attention.linear_qkv.bias": Heads(("attention.query_key_value.bias",)),
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
SOLAR_OPEN = Family(
    model_type="solar_open",
    layers=LAYERS | EXPERT_LAYERS,
    flags=flags_of(model_flags, expert_flags, sigmoid_gates, shared_experts, QKV_BIASES),
)
# dots.llm1 (2506.05767): norms of each query and key head.
DOTS_1 = Family(
    model_type="dots1",
    layers=LAYERS | EXPERT_LAYERS,
    flags=flags_of(
        requires("attention_bias", False), model_flags, window_flags, expert_flags, sigmoid_gates, shared_experts,
        dense_then_experts, QK_NORMS,
    ),
)  # fmt: skip
