"""GLM-4-9B (2406.12793): rotary positions of neighbouring channels, half of them; biases in queries, keys, values."""

from megarl.mcore.weights.hf.family import LAYERS, Family, model_flags, qkv_biases
from megarl.mcore.weights.hf.mapping import neighbour_heads, rows
from megarl.mcore.weights.hf.model_config import ModelConfig

ROTATED = 0.5  # of a head's channels


def flags(config: ModelConfig) -> dict[str, object]:
    """Adds the biases."""
    if (config.get("rope_parameters") or {}).get("partial_rotary_factor") != ROTATED:
        raise config.error("rope_parameters", f"a partial_rotary_factor of {ROTATED} in this family")
    return model_flags(config) | qkv_biases(config)


FAMILY = Family(
    model_type="glm",
    layers=LAYERS
    | {
        f"self_attention.linear_qkv.{name}": neighbour_heads(
            *(f"self_attn.{x}_proj.{name}" for x in "qkv"), rotated=ROTATED
        )
        for name in ("weight", "bias")
    }
    | {"mlp.linear_fc1.weight": rows("mlp.gate_up_proj.weight")},
    flags=flags,
)
