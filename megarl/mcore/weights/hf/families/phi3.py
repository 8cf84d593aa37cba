"""Phi-3 and Phi-4 (2404.14219, 2412.08905): one tensor of q, k and v, and one of gate and up."""

from megarl.mcore.weights.hf.family import LAYERS, Family, model_flags, window_flags
from megarl.mcore.weights.hf.mapping import fused_heads, rows
from megarl.mcore.weights.hf.model_config import ModelConfig


def flags(config: ModelConfig) -> dict[str, object]:
    """Those of all families. Dropout is off, as in all of megarl's models."""
    return model_flags(config) | window_flags(config)


FAMILY = Family(
    model_type="phi3",
    layers=LAYERS
    | {
        "self_attention.linear_qkv.weight": fused_heads("self_attn.qkv_proj.weight"),
        "mlp.linear_fc1.weight": rows("mlp.gate_up_proj.weight"),
    },
    flags=flags,
)
