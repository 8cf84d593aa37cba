"""OLMoE (2409.02060): norms of queries and keys over all heads, gates that are shares of a softmax over all experts."""

from megarl.mcore.weights.hf.experts import expert_flags, softmax_gates
from megarl.mcore.weights.hf.family import ALL_HEADS_NORMS, EXPERT_LAYERS, LAYERS, Family, model_flags
from megarl.mcore.weights.hf.model_config import ModelConfig


def flags(config: ModelConfig) -> dict[str, object]:
    """Adds experts and norms."""
    config.require("attention_bias", False)
    config.require("clip_qkv", None)
    found = model_flags(config) | expert_flags(config, config.whole("intermediate_size")) | softmax_gates(config)
    return found | {"qk-layernorm-all-heads": True}


FAMILY = Family(
    model_type="olmoe",
    layers=LAYERS | ALL_HEADS_NORMS | EXPERT_LAYERS,
    flags=flags,
)
