"""Families of Mistral: layers of Llama, some with a window; experts; latents."""

from megarl.mcore.weights.hf.config_flags import (
    Flags,
    expert_flags,
    flags_of,
    model_flags,
    requires,
    softmax_gates,
    window_flags,
)
from megarl.mcore.weights.hf.families.deepseek import deepseek_flags
from megarl.mcore.weights.hf.family import EXPERT_LAYERS, LATENT, LAYERS, LLAVA, Family, expert_layers
from megarl.mcore.weights.hf.model_config import ModelConfig


def _check_query_scaling(config: ModelConfig):
    """UsageError if a query may be scaled by its position, as transformers does it after a number of tokens."""
    parameters = config.get("rope_parameters")
    if parameters.get("llama_4_scaling_beta"):
        unscaled, why = parameters.get("original_max_position_embeddings"), ", since later queries are scaled"
        config.check_length("rope_parameters", unscaled, f"{why} (llama_4_scaling_beta)")


# 2310.06825
MISTRAL = Family("mistral", LAYERS, flags_of(model_flags, window_flags))
MINISTRAL = MISTRAL._replace(model_type="ministral")
# Ministral 3 and Devstral Small 2: queries far from the beginning are longer.
MINISTRAL_3 = Family("ministral3", LAYERS, flags_of(_check_query_scaling, model_flags, window_flags))
# Mistral Small 3.1 and 3.2, Ministral 3, Devstral Small 2, Mistral Small 4, with a vision tower.
MISTRAL_3 = MISTRAL._replace(
    model_type="mistral3", config_type="mistral", multimodal=LLAVA._replace(texts=("ministral3", "mistral4"))
)


def _mistral_4_flags(config: ModelConfig) -> Flags:
    """Those of DeepSeek's layers with the gates, for sequences in which no query is scaled."""
    found = deepseek_flags(config) | softmax_gates(config)
    rotated, others = config.whole("qk_rope_head_dim"), config.whole("qk_nope_head_dim")
    if found.pop("rotary-percent", 1) != rotated / (rotated + others):  # of whole heads, which have both parts
        raise config.error("rope_parameters", "a partial_rotary_factor that is the share of qk_rope_head_dim")
    return found


# Mistral Small 4: multi-latent attention, softmax gates over the chosen experts, shared experts.
MISTRAL_4 = Family(
    model_type="mistral4",
    layers=LATENT | EXPERT_LAYERS,
    flags=flags_of(
        requires("rope_interleave", True),
        requires("n_group", 1),
        requires("routed_scaling_factor", 1.0),
        _check_query_scaling,
        _mistral_4_flags,
    ),
)

# Mixtral (2401.04088): gates are a softmax over the chosen experts alone. Training-time jitter is not applied.
MIXTRAL = Family(
    model_type="mixtral",
    layers=LAYERS | expert_layers("block_sparse_moe.gate", "block_sparse_moe.experts", "w1", "w3", "w2"),
    flags=flags_of(model_flags, window_flags, lambda config: expert_flags(config, "intermediate_size")),
)
