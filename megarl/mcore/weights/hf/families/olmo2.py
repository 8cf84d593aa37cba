"""OLMo 2 (2501.00656): norms after attention and MLP alone, and of queries and keys over all heads."""

from megarl.mcore.weights.hf.family import POST_NORM, Family, model_flags
from megarl.mcore.weights.hf.model_config import ModelConfig


def flags(config: ModelConfig) -> dict[str, object]:
    """Adds the norms."""
    config.require("attention_bias", False, None)
    return model_flags(config) | {"layernorm-position": "post", "qk-layernorm-all-heads": True}


FAMILY = Family(
    model_type="olmo2",
    layers=POST_NORM,
    flags=flags,
)
