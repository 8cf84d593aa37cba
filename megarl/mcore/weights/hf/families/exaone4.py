"""EXAONE 4 (2507.11407): norms after attention and MLP alone; layers without a window have no positions."""

from megarl.mcore.weights.hf.family import SANDWICH, Family, model_flags, positions_of_windows, window_flags
from megarl.mcore.weights.hf.model_config import ModelConfig


def flags(config: ModelConfig) -> dict[str, object]:
    """Adds the norms, the windows, and which layers have no positions: in models with windows those without one."""
    found = model_flags(config) | window_flags(config) | {"layernorm-position": "post", "qk-layernorm": True}
    return found if config.get("sliding_window") is None else found | positions_of_windows(config)


FAMILY = Family(
    model_type="exaone4",
    layers={key: value for key, value in SANDWICH.items() if "layer_norm_weight" not in key},
    flags=flags,
)
