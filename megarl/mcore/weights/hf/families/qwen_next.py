"""Families of Qwen with gated delta nets: gated attention in the other layers, zero-centred norms."""

from megarl.mcore.weights.hf.experts import expert_flags, gated_shared_expert, softmax_gates, sparse_layers
from megarl.mcore.weights.hf.family import (
    FULL,
    LAYERS,
    LINEAR,
    PREDICTION_MODULE,
    QKV_NAMES,
    QWEN_VL,
    Family,
    Flags,
    expert_layers,
    flags_of,
    layer_pattern,
    model_flags,
)
from megarl.mcore.weights.hf.mapping import GatedHeads, Mapping, recurrent_parts, rows
from megarl.mcore.weights.hf.model_config import ModelConfig

LINEAR_SIZES = ("conv_kernel_dim", "key_head_dim", "value_head_dim", "num_key_heads", "num_value_heads")


def _layers(projections: dict[str, Mapping]) -> dict[str, Mapping]:
    """The weights of all layers but their experts; `projections`: the parts of a gated delta net's first projection."""
    convolution = recurrent_parts("linear_attn.conv1d.weight", "query", "key", "value")
    return {
        **LAYERS,
        "self_attention.linear_qkv.weight": GatedHeads(QKV_NAMES),
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
    config.require("attention_bias", False, None)
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

# Qwen3-Next: two tensors of the first projection, by key heads; experts with a gated shared one.
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
