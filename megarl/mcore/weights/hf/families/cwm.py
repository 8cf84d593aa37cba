"""Code World Model (2510.02387): layers of Llama, some with a window."""

from megarl.mcore.weights.hf.family import LAYERS, Family, model_flags, window_flags
from megarl.mcore.weights.hf.model_config import ModelConfig


def flags(config: ModelConfig) -> dict[str, object]:
    """Adds the windows."""
    config.require("mlp_bias", False)
    return model_flags(config) | window_flags(config)


FAMILY = Family(
    model_type="cwm",
    layers=LAYERS,
    flags=flags,
)
