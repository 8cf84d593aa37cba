"""dots.llm1 (2506.05767): norms of each query and key head, sigmoid gates with a correction bias, shared experts."""

from megarl.mcore.weights.hf.experts import dense_then_experts, expert_flags, shared_experts, sigmoid_gates
from megarl.mcore.weights.hf.family import EXPERT_LAYERS, LAYERS, Family, model_flags, window_flags
from megarl.mcore.weights.hf.model_config import ModelConfig


def flags(config: ModelConfig) -> dict[str, object]:
    """Adds experts, shared experts and norms."""
    config.require("attention_bias", False)
    found = model_flags(config) | window_flags(config) | expert_flags(config, config.whole("moe_intermediate_size"))
    found |= sigmoid_gates(config) | shared_experts(config) | dense_then_experts(config)
    return found | {"qk-layernorm": True}


FAMILY = Family(
    model_type="dots1",
    layers=LAYERS | EXPERT_LAYERS,
    flags=flags,
)
