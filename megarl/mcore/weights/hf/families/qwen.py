"""Families of Qwen with attention in all layers, and relatives."""

from megarl.mcore.weights.hf.experts import (
    dense_then_experts,
    expert_flags,
    gated_shared_expert,
    softmax_gates,
    sparse_layers,
)
from megarl.mcore.weights.hf.family import (
    EXPERT_LAYERS,
    LAYERS,
    QK_NORMS,
    QWEN2_VL,
    QWEN_VL,
    Family,
    Prediction,
    expert_layers,
    flags_of,
    model_flags,
    requires,
    switched,
    window_flags,
)
from megarl.mcore.weights.hf.mapping import StackedExperts, rows
from megarl.mcore.weights.hf.rotary import rotary_flags_by_kind

_NO_BIASES = requires("attention_bias", False, None)

# Qwen2 and Qwen2.5 (2407.10671, 2412.15115): biases of queries, keys and values.
QWEN_2 = Family("qwen2", LAYERS, flags_of(model_flags, window_flags, {"add-qkv-bias": True}))
# Qwen2-VL (2409.12191), Qwen2.5-VL (2502.13923): the rotation of their text in three axes is the plain one.
QWEN_2_VL = QWEN_2._replace(model_type="qwen2_vl", config_type="qwen2_vl_text", multimodal=QWEN2_VL)
QWEN_2_5_VL = QWEN_2._replace(model_type="qwen2_5_vl", config_type="qwen2_5_vl_text", multimodal=QWEN2_VL)
# Qwen1.5-MoE and Qwen2-MoE: shared experts with a gate; gates of experts need not add up to 1.
QWEN_2_MOE = Family(
    model_type="qwen2_moe",
    layers=LAYERS | expert_layers(shared="mlp.shared_expert"),
    flags=flags_of(
        model_flags,
        window_flags,
        expert_flags,
        softmax_gates,
        sparse_layers,
        gated_shared_expert,
        switched("qkv_bias", {"add-qkv-bias": True}),
    ),
)

# Qwen3 (2505.09388): norms of each query and key head.
QWEN_3 = Family("qwen3", LAYERS, flags_of(_NO_BIASES, model_flags, window_flags, QK_NORMS))
QWEN_3_MOE = Family(
    model_type="qwen3_moe",
    layers=LAYERS | EXPERT_LAYERS,
    flags=flags_of(_NO_BIASES, model_flags, window_flags, expert_flags, softmax_gates, sparse_layers, QK_NORMS),
)
# Its interleaved rotation in three axes is the plain one in text.
QWEN_3_VL = QWEN_3._replace(model_type="qwen3_vl", config_type="qwen3_vl_text", multimodal=QWEN_VL)
# All experts of a layer in two transposed tensors; their gates are always normalized.
QWEN_3_VL_MOE = Family(
    model_type="qwen3_vl_moe",
    layers={
        **LAYERS,
        "mlp.router.weight": rows("mlp.gate.weight"),
        "mlp.experts.experts.linear_fc1.weight": StackedExperts(("mlp.experts.gate_up_proj",), is_transposed=True),
        "mlp.experts.experts.linear_fc2.weight": StackedExperts(("mlp.experts.down_proj",), is_transposed=True),
    },
    flags=flags_of(_NO_BIASES, model_flags, expert_flags, sparse_layers, QK_NORMS),
    config_type="qwen3_vl_moe_text",
    multimodal=QWEN_VL,
)

# Mellum 2: Qwen3-MoE's layers, some with a window and a rotation of their own, some without experts.
MELLUM = Family(
    model_type="mellum",
    layers=LAYERS | EXPERT_LAYERS,
    flags=flags_of(
        _NO_BIASES,
        lambda config: model_flags(config, rotary=rotary_flags_by_kind),
        window_flags,
        expert_flags,
        softmax_gates,
        dense_then_experts,
        QK_NORMS,
    ),
    prediction=Prediction(r"mtp\..+", {}, ("num_mtp_layers", "num_nextn_predict_layers")),
)
