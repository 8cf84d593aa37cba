"""Qwen3.5 without experts, text alone: as Qwen3-Next, with more tensors of the gated delta net."""

from megarl.mcore.weights.hf.family import GATED, Family, delta_net_flags, delta_net_layers, model_flags
from megarl.mcore.weights.hf.mapping import Mapping, recurrent_parts, rows
from megarl.mcore.weights.hf.model_config import ModelConfig

PROJECTIONS: dict[str, Mapping] = {
    **recurrent_parts("linear_attn.in_proj_qkv.weight", "query", "key", "value"),
    "z": rows("linear_attn.in_proj_z.weight"),
    "beta": rows("linear_attn.in_proj_b.weight"),
    "alpha": rows("linear_attn.in_proj_a.weight"),
}


def flags(config: ModelConfig) -> dict[str, object]:
    """Adds gated delta nets."""
    return model_flags(config) | delta_net_flags(config)


FAMILY = Family(model_type="qwen3_5_text", layers=GATED | delta_net_layers(PROJECTIONS), flags=flags)
