"""Qwen3 (2505.09388): norms of each query and key head."""

from megarl.mcore.weights.hf.family import LAYERS, Family, model_flags, window_flags
from megarl.mcore.weights.hf.model_config import ModelConfig


def flags(config: ModelConfig) -> dict[str, object]:
    """Adds the norms."""
    config.require("attention_bias", False, None)
    return model_flags(config) | window_flags(config) | {"qk-layernorm": True}


FAMILY = Family(
    model_type="qwen3",
    layers=LAYERS,
    flags=flags,
)
