"""Qwen3-MoE (2505.09388)."""

from megarl.mcore.weights.hf.experts import expert_flags, softmax_gates, sparse_layers
from megarl.mcore.weights.hf.family import EXPERT_LAYERS, LAYERS, Family, model_flags, window_flags
from megarl.mcore.weights.hf.model_config import ModelConfig


def flags(config: ModelConfig) -> dict[str, object]:
    """Adds experts and the norms of queries and keys."""
    config.require("attention_bias", False, None)
    found = model_flags(config) | window_flags(config)
    found |= expert_flags(config, config.whole("moe_intermediate_size"))
    return found | softmax_gates(config) | sparse_layers(config) | {"qk-layernorm": True}


FAMILY = Family(
    model_type="qwen3_moe",
    layers=LAYERS | EXPERT_LAYERS,
    flags=flags,
)
