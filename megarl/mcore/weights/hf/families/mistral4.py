"""Mistral Small 4: multi-latent attention, softmax gates over the chosen experts, shared experts."""

from megarl.mcore.weights.hf.deepseek import deepseek_flags
from megarl.mcore.weights.hf.experts import softmax_gates
from megarl.mcore.weights.hf.family import EXPERT_LAYERS, LATENT, Family
from megarl.mcore.weights.hf.model_config import ModelConfig
from megarl.mcore.weights.hf.rotary import check_query_scaling


def flags(config: ModelConfig) -> dict[str, object]:
    """Those of DeepSeek's layers with the gates, for sequences in which no query is scaled."""
    config.require("rope_interleave", True)
    config.require("n_group", 1)
    config.require("routed_scaling_factor", 1.0)
    check_query_scaling(config)
    found = deepseek_flags(config) | softmax_gates(config)
    rotated, others = config.whole("qk_rope_head_dim"), config.whole("qk_nope_head_dim")
    if found.pop("rotary-percent", 1) != rotated / (rotated + others):  # of whole heads, which have both parts
        raise config.error("rope_parameters", "a partial_rotary_factor that is the share of qk_rope_head_dim")
    return found


FAMILY = Family(
    model_type="mistral4",
    layers=LATENT | EXPERT_LAYERS,
    flags=flags,
)
