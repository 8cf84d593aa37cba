"""Mixtral (2401.04088): gates are a softmax over the chosen experts alone."""

from megarl.mcore.weights.hf.experts import expert_flags
from megarl.mcore.weights.hf.family import LAYERS, Family, expert_layers, model_flags, window_flags
from megarl.mcore.weights.hf.model_config import ModelConfig


def flags(config: ModelConfig) -> dict[str, object]:
    """Adds the experts. Training-time jitter is not applied."""
    return model_flags(config) | window_flags(config) | expert_flags(config, config.whole("intermediate_size"))


FAMILY = Family(
    model_type="mixtral",
    layers=LAYERS | expert_layers("block_sparse_moe.gate", "block_sparse_moe.experts", "w1", "w3", "w2"),
    flags=flags,
)
