"""GLM-4.5 and 4.6 (2508.06471): sigmoid gates with a correction bias, shared experts, first layers dense."""

from megarl.mcore.weights.hf.experts import dense_then_experts, expert_flags, shared_experts, sigmoid_gates
from megarl.mcore.weights.hf.family import EXPERT_LAYERS, LAYERS, PREDICTION_LAYERS, Family, model_flags, qkv_biases
from megarl.mcore.weights.hf.model_config import ModelConfig


def flags(config: ModelConfig) -> dict[str, object]:
    """Adds experts, shared experts, biases of queries, keys and values, and norms of queries and keys."""
    found = model_flags(config) | expert_flags(config, config.whole("moe_intermediate_size"))
    found |= sigmoid_gates(config) | shared_experts(config) | dense_then_experts(config)
    return found | qkv_biases(config) | ({"qk-layernorm": True} if config.switch("use_qk_norm") else {})


FAMILY = Family(
    model_type="glm4_moe",
    layers=LAYERS | EXPERT_LAYERS,
    flags=flags,
    prediction=PREDICTION_LAYERS,
)
