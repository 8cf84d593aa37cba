"""Gemma 3, text (2503.19786): norms of heads; five layers with a window and a rotation of their own, one without."""

from megarl.mcore.weights.hf.family import SANDWICH, Family, window_flags
from megarl.mcore.weights.hf.gemma import gemma_flags
from megarl.mcore.weights.hf.model_config import ModelConfig
from megarl.mcore.weights.hf.rotary import rotary_flags_by_kind


def flags(config: ModelConfig) -> dict[str, object]:
    """Those of Gemma, the norms of queries and keys, and the windows."""
    return gemma_flags(config, rotary_flags_by_kind) | window_flags(config) | {"qk-layernorm": True}


FAMILY = Family(
    model_type="gemma3_text",
    layers=SANDWICH,
    flags=flags,
)
