"""OLMo 3: layers of OLMo 2, three of four with a window; YaRN in the others alone."""

from megarl.mcore.weights.hf.family import POST_NORM, Family, model_flags, window_flags
from megarl.mcore.weights.hf.model_config import ModelConfig
from megarl.mcore.weights.hf.rotary import rotary_flags_by_kind


def flags(config: ModelConfig) -> dict[str, object]:
    """Adds the norms and the windows."""
    config.require("attention_bias", False, None)
    found = model_flags(config, rotary=rotary_flags_by_kind) | window_flags(config)
    return found | {"layernorm-position": "post", "qk-layernorm-all-heads": True}


FAMILY = Family(
    model_type="olmo3",
    layers=POST_NORM,
    flags=flags,
)
