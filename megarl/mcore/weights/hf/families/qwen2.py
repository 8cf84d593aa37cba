"""Qwen2 and Qwen2.5 (2407.10671, 2412.15115): biases of queries, keys and values."""

from megarl.mcore.weights.hf.family import LAYERS, Family, model_flags, window_flags
from megarl.mcore.weights.hf.model_config import ModelConfig


def flags(config: ModelConfig) -> dict[str, object]:
    """Adds the biases."""
    return model_flags(config) | window_flags(config) | {"add-qkv-bias": True}


FAMILY = Family(
    model_type="qwen2",
    layers=LAYERS,
    flags=flags,
)
