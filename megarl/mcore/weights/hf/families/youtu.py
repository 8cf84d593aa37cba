"""Youtu-LLM: DeepSeek-V3's attention, no experts."""

from megarl.mcore.weights.hf.deepseek import latent_attention_flags
from megarl.mcore.weights.hf.family import LATENT, Family
from megarl.mcore.weights.hf.model_config import ModelConfig


def flags(config: ModelConfig) -> dict[str, object]:
    """Those of multi-latent attention."""
    config.require("rope_interleave", True)
    return latent_attention_flags(config)


FAMILY = Family(
    model_type="youtu",
    layers=LATENT,
    flags=flags,
)
