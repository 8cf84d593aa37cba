"""SmolLM3: every fourth layer has no positions (2501.18795)."""

from megarl.mcore.weights.hf.family import LAYERS, Family, model_flags, window_flags
from megarl.mcore.weights.hf.model_config import ModelConfig


def flags(config: ModelConfig) -> dict[str, object]:
    """Adds which layers have no positions: those with 0 in the list."""
    config.require("attention_bias", False)
    config.require("mlp_bias", False)
    rotates = config.items("no_rope_layers", int, "0 and 1")
    if len(rotates) != config.whole("num_hidden_layers") or not set(rotates) <= {0, 1}:
        raise config.error("no_rope_layers", "0 or 1 for each layer")
    pattern = str([1 - each for each in rotates]).replace(" ", "")
    return model_flags(config) | window_flags(config) | ({} if all(rotates) else {"no-rope-freq": pattern})


FAMILY = Family(
    model_type="smollm3",
    layers=LAYERS,
    flags=flags,
)
