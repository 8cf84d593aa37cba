"""Solar Open: sigmoid gates with a correction bias, shared experts."""

from megarl.mcore.weights.hf.experts import expert_flags, shared_experts, sigmoid_gates
from megarl.mcore.weights.hf.family import EXPERT_LAYERS, LAYERS, Family, model_flags, qkv_biases
from megarl.mcore.weights.hf.model_config import ModelConfig


def flags(config: ModelConfig) -> dict[str, object]:
    """Adds experts and shared experts, and biases of queries, keys and values."""
    found = model_flags(config) | expert_flags(config, config.whole("moe_intermediate_size"))
    found |= sigmoid_gates(config) | shared_experts(config)
    return found | qkv_biases(config)


FAMILY = Family(
    model_type="solar_open",
    layers=LAYERS | EXPERT_LAYERS,
    flags=flags,
)
