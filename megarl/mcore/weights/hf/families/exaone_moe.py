"""K-EXAONE (2601.01739): EXAONE 4's attention between the usual norms, sigmoid gates with a correction bias."""

from megarl.mcore.weights.hf.experts import deepseek_gates, dense_then_experts, expert_flags, shared_experts
from megarl.mcore.weights.hf.family import (
    EXPERT_LAYERS,
    LAYERS,
    Family,
    Prediction,
    model_flags,
    positions_of_windows,
    window_flags,
)
from megarl.mcore.weights.hf.mapping import rows
from megarl.mcore.weights.hf.model_config import ModelConfig


def flags(config: ModelConfig) -> dict[str, object]:
    """Adds windows, layers without positions, norms of queries and keys, experts."""
    found = model_flags(config) | window_flags(config) | positions_of_windows(config) | {"qk-layernorm": True}
    found |= expert_flags(config, config.whole("moe_intermediate_size"))
    return found | deepseek_gates(config) | shared_experts(config) | dense_then_experts(config)


FAMILY = Family(
    model_type="exaone_moe",
    layers=LAYERS | EXPERT_LAYERS | {"mlp.router.expert_bias": rows("mlp.e_score_correction_bias")},
    flags=flags,
    prediction=Prediction(r"mtp\..+", {}, ("num_nextn_predict_layers",)),
)
