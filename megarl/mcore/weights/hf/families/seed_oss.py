"""Seed-OSS: biases of queries, keys and values."""

from megarl.mcore.weights.hf.family import LAYERS, Family, model_flags, qkv_biases
from megarl.mcore.weights.hf.model_config import ModelConfig


def flags(config: ModelConfig) -> dict[str, object]:
    """Adds the biases."""
    config.require("attention_out_bias", False)
    config.require("mlp_bias", False)
    return model_flags(config) | qkv_biases(config)


FAMILY = Family(
    model_type="seed_oss",
    layers=LAYERS,
    flags=flags,
)
