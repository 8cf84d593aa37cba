"""Qwen3.5 with experts, text alone: tensors of Qwen3.5's gated delta net, experts of Qwen3-Next in all layers."""

from megarl.mcore.weights.hf.families.qwen3_5_text import PROJECTIONS
from megarl.mcore.weights.hf.families.qwen3_next import EXPERTS, shared_expert_flags
from megarl.mcore.weights.hf.family import GATED, Family, delta_net_flags, delta_net_layers, model_flags
from megarl.mcore.weights.hf.model_config import ModelConfig


def flags(config: ModelConfig) -> dict[str, object]:
    """Adds gated delta nets, experts and shared experts."""
    return model_flags(config) | delta_net_flags(config) | shared_expert_flags(config)


FAMILY = Family(model_type="qwen3_5_moe_text", layers=GATED | EXPERTS | delta_net_layers(PROJECTIONS), flags=flags)
