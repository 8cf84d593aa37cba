"""Llama 2 and 3, SmolLM2, and others of the same architecture (2307.09288, 2407.21783)."""

from megarl.mcore.weights.hf.family import LAYERS, Family, model_flags
from megarl.mcore.weights.hf.model_config import ModelConfig


def flags(config: ModelConfig) -> dict[str, object]:
    """Biases in all projections or in none: Megatron has no flag for those of attention alone."""
    biases = config.switch("attention_bias"), config.switch("mlp_bias")
    if biases[0] != biases[1]:
        raise config.error("attention_bias", f"{biases[1]}, the value of mlp_bias")
    found = model_flags(config)
    if all(biases):
        del found["disable-bias-linear"]
    return found


FAMILY = Family(
    model_type="llama",
    layers=LAYERS,
    flags=flags,
)
