"""Gemma 2 (2408.00118): windows in every second layer, softcaps."""

from megarl.mcore.weights.hf.family import SANDWICH, Family, window_flags
from megarl.mcore.weights.hf.gemma import gemma_flags
from megarl.mcore.weights.hf.model_config import ModelConfig


def flags(config: ModelConfig) -> dict[str, object]:
    """Those of Gemma, and the windows."""
    return gemma_flags(config) | window_flags(config)


FAMILY = Family(
    model_type="gemma2",
    layers=SANDWICH,
    flags=flags,
)
