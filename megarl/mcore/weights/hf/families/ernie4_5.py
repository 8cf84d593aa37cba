"""ERNIE 4.5, dense: rotary positions of neighbouring channels."""

from megarl.mcore.weights.hf.family import LAYERS, Family, model_flags
from megarl.mcore.weights.hf.mapping import neighbour_heads
from megarl.mcore.weights.hf.model_config import ModelConfig


def flags(config: ModelConfig) -> dict[str, object]:
    """Those of all families; without biases."""
    config.require("use_bias", False)
    return model_flags(config)


FAMILY = Family(
    model_type="ernie4_5",
    layers=LAYERS
    | {"self_attention.linear_qkv.weight": neighbour_heads(*(f"self_attn.{x}_proj.weight" for x in "qkv"))},
    flags=flags,
)
