"""Families of Qwen, and relatives: attention in all layers, or gated delta nets in most of them."""

from megarl.mcore.weights.hf.config_flags import (
    FULL,
    LINEAR,
    QK_NORMS,
    Flags,
    dense_then_experts,
    expert_flags,
    flags_of,
    gated_shared_expert,
    layer_pattern,
    model_flags,
    requires,
    rotary_flags_by_kind,
    softmax_gates,
    sparse_layers,
    switched,
    window_flags,
)
from megarl.mcore.weights.hf.family import (
    EXPERT_LAYERS,
    LAYERS,
    PREDICTION_MODULE,
    QKV_NAMES,
    QWEN2_VL,
    QWEN_VL,
    Family,
    Prediction,
    expert_layers,
)
from megarl.mcore.weights.hf.mapping import Heads, Mapping, StackedExperts, recurrent_parts, rows
from megarl.mcore.weights.hf.model_config import ModelConfig

_NO_BIASES = requires(attention_bias=(False, None))
LINEAR_SIZES = ("conv_kernel_dim", "key_head_dim", "value_head_dim", "num_key_heads", "num_value_heads")

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


def _layers(projections: dict[str, Mapping]) -> dict[str, Mapping]:
    """The weights of all layers but their experts; `projections`: the parts of a gated delta net's first projection."""
    convolution = recurrent_parts("linear_attn.conv1d.weight", "query", "key", "value")
    return {
        **LAYERS,
        "self_attention.linear_qkv.weight": Heads(QKV_NAMES, gates_follow=True),
        "self_attention.in_proj.layer_norm_weight": rows("input_layernorm.weight"),
        **{f"self_attention.in_proj.weight.{part}": mapping for part, mapping in projections.items()},
        **{f"self_attention.conv1d.weight.{part}": mapping for part, mapping in convolution.items()},
        "self_attention.dt_bias": rows("linear_attn.dt_bias"),
        "self_attention.A_log": rows("linear_attn.A_log"),
        "self_attention.out_norm.weight": rows("linear_attn.norm.weight"),
        "self_attention.out_proj.weight": rows("linear_attn.out_proj.weight"),
    }


def _delta_net_flags(config: ModelConfig) -> Flags:
    """Which layers have a gated delta net, its sizes, and gated attention with norms of queries and keys in others."""
    config.require(attention_bias=(False, None))
    kinds = config.items("layer_types", str, "names")
    if other := set(kinds) - {FULL, LINEAR}:
        raise config.error("layer_types", f"{FULL} or {LINEAR} of each layer, not {min(other)}")
    found: Flags = {
        "qk-layernorm": True,
        "apply-layernorm-1p": True,
        "attention-output-gate": True,
        "experimental-attention-variant": "gated_delta_net",
        "linear-attention-freq": layer_pattern(kind == LINEAR for kind in kinds),
    }
    return found | {f"linear-{name.replace('_', '-')}": config.whole(f"linear_{name}") for name in LINEAR_SIZES}


_EXPERTS = expert_layers(shared="mlp.shared_expert")

# Qwen3-Next: gated attention in the layers without a delta net, zero-centred norms; two tensors of the first
# projection, by key heads; experts with a gated shared one.
QWEN_3_NEXT = Family(
    model_type="qwen3_next",
    layers=_EXPERTS
    | _layers(
        recurrent_parts("linear_attn.in_proj_qkvz.weight", "query", "key", "value", "z", by_key_head=True)
        | recurrent_parts("linear_attn.in_proj_ba.weight", "beta", "alpha", by_key_head=True)
    ),
    flags=flags_of(model_flags, _delta_net_flags, softmax_gates, sparse_layers, expert_flags, gated_shared_expert),
    prediction=PREDICTION_MODULE,
)

# Qwen3.5, text alone: more tensors of the first projection.
_LAYERS = _layers(
    {
        **recurrent_parts("linear_attn.in_proj_qkv.weight", "query", "key", "value"),
        "z": rows("linear_attn.in_proj_z.weight"),
        "beta": rows("linear_attn.in_proj_b.weight"),
        "alpha": rows("linear_attn.in_proj_a.weight"),
    }
)
QWEN_3_5_TEXT = Family("qwen3_5_text", _LAYERS, flags_of(model_flags, _delta_net_flags))
QWEN_3_5_MOE_TEXT = Family(
    model_type="qwen3_5_moe_text",
    layers=_LAYERS | _EXPERTS,
    flags=flags_of(model_flags, _delta_net_flags, expert_flags, gated_shared_expert),
)
# As published, with a vision tower: the rotation of their text in three axes is the plain one.
QWEN_3_5 = QWEN_3_5_TEXT._replace(
    model_type="qwen3_5", config_type="qwen3_5_text", prediction=PREDICTION_MODULE, multimodal=QWEN_VL
)
QWEN_3_5_MOE = QWEN_3_5_MOE_TEXT._replace(
    model_type="qwen3_5_moe", config_type="qwen3_5_moe_text", prediction=PREDICTION_MODULE, multimodal=QWEN_VL
)
