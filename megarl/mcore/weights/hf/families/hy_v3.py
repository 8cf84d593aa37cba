"""Hy3: norms of each query and key head, sigmoid gates with a correction bias, shared experts."""

from megarl.mcore.weights.hf.experts import (
    SIGMOID_GATES,
    check_several,
    dense_then_experts,
    expert_flags,
    shared_experts,
)
from megarl.mcore.weights.hf.family import EXPERT_LAYERS, LAYERS, Family, Prediction, expert_layers, model_flags
from megarl.mcore.weights.hf.mapping import rows
from megarl.mcore.weights.hf.model_config import ModelConfig

_EXPERTS = expert_layers("mlp.router.gate", "mlp.experts", "gate_proj", "up_proj", "down_proj", "mlp.shared_mlp")


def flags(config: ModelConfig) -> dict[str, object]:
    """Adds experts and norms of queries and keys."""
    config.require("attention_bias", False)
    config.require("mlp_bias", False)
    check_several(config)
    found = model_flags(config) | expert_flags(config, config.whole("moe_intermediate_size")) | SIGMOID_GATES
    found |= shared_experts(config) | dense_then_experts(config) | {"qk-layernorm": True}
    return found | {"moe-router-topk-scaling-factor": config.number("router_scaling_factor")}


FAMILY = Family(
    model_type="hy_v3",
    layers=LAYERS | _EXPERTS | {"mlp.router.expert_bias": rows("mlp.expert_bias")},
    flags=flags,
    modules=LAYERS | EXPERT_LAYERS,
    prediction=Prediction(r"model\.layers\.{layer}\..+", {}, ("num_nextn_predict_layers",)),
)
