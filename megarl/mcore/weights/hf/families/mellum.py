"""Mellum 2: Qwen3-MoE's layers, some with a window and a rotation of their own, some without experts."""

from megarl.mcore.weights.hf.experts import dense_then_experts, expert_flags, softmax_gates
from megarl.mcore.weights.hf.family import EXPERT_LAYERS, LAYERS, Family, Prediction, model_flags, window_flags
from megarl.mcore.weights.hf.model_config import ModelConfig
from megarl.mcore.weights.hf.rotary import rotary_flags_by_kind


def flags(config: ModelConfig) -> dict[str, object]:
    """Adds windows, experts, and the norms of queries and keys."""
    config.require("attention_bias", False, None)
    found = model_flags(config, rotary=rotary_flags_by_kind) | window_flags(config)
    found |= expert_flags(config, config.whole("moe_intermediate_size"))
    return found | softmax_gates(config) | dense_then_experts(config) | {"qk-layernorm": True}


FAMILY = Family(
    model_type="mellum",
    layers=LAYERS | EXPERT_LAYERS,
    flags=flags,
    prediction=Prediction(r"mtp\..+", {}, ("num_mtp_layers", "num_nextn_predict_layers")),
)
