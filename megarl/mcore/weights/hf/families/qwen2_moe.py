"""Qwen1.5-MoE and Qwen2-MoE (2407.10671): shared experts with a gate; gates of experts need not add up to 1."""

from megarl.mcore.weights.hf.experts import expert_flags, softmax_gates, sparse_layers
from megarl.mcore.weights.hf.family import LAYERS, Family, expert_layers, model_flags, window_flags
from megarl.mcore.weights.hf.model_config import ModelConfig


def flags(config: ModelConfig) -> dict[str, object]:
    """Adds experts, shared experts and biases of queries, keys and values."""
    found = model_flags(config) | window_flags(config)
    found |= expert_flags(config, config.whole("moe_intermediate_size"))
    found |= softmax_gates(config) | sparse_layers(config)
    found["moe-shared-expert-intermediate-size"] = config.whole("shared_expert_intermediate_size")
    found["moe-shared-expert-gate"] = True
    return found | ({"add-qkv-bias": True} if config.switch("qkv_bias") else {})


FAMILY = Family(
    model_type="qwen2_moe",
    layers=LAYERS | expert_layers("mlp.gate", "mlp.experts", "gate_proj", "up_proj", "down_proj", "mlp.shared_expert"),
    flags=flags,
)
