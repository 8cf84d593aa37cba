"""Mistral (2310.06825)."""

from megarl.mcore.weights.hf.family import LAYERS, Family, model_flags, window_flags
from megarl.mcore.weights.hf.model_config import ModelConfig


def flags(config: ModelConfig) -> dict[str, object]:
    """Those of all families."""
    return model_flags(config) | window_flags(config)


FAMILY = Family(
    model_type="mistral",
    layers=LAYERS,
    flags=flags,
)
