"""Families of EXAONE: layers without a window have no positions."""

from megarl.mcore.weights.hf.experts import deepseek_gates, dense_then_experts, expert_flags, shared_experts
from megarl.mcore.weights.hf.family import (
    EXPERT_LAYERS,
    LAYERS,
    POST_NORM,
    QK_NORMS,
    Family,
    Flags,
    Prediction,
    flags_of,
    model_flags,
    positions_of_windows,
    window_flags,
)
from megarl.mcore.weights.hf.mapping import rows
from megarl.mcore.weights.hf.model_config import ModelConfig


def _positions(config: ModelConfig) -> Flags:
    """In models without windows all layers have positions."""
    return {} if config.get("sliding_window") is None else positions_of_windows(config)


# EXAONE 4 (2507.11407): norms after attention and MLP alone.
EXAONE_4 = Family(
    model_type="exaone4",
    layers=POST_NORM,
    flags=flags_of(model_flags, window_flags, {"layernorm-position": "post"}, QK_NORMS, _positions),
)

# K-EXAONE (2601.01739): the usual norms, sigmoid gates with a correction bias.
EXAONE_MOE = Family(
    model_type="exaone_moe",
    layers=LAYERS | EXPERT_LAYERS | {"mlp.router.expert_bias": rows("mlp.e_score_correction_bias")},
    flags=flags_of(
        model_flags, window_flags, positions_of_windows, QK_NORMS, expert_flags, deepseek_gates, shared_experts,
        dense_then_experts,
    ),
    prediction=Prediction(r"mtp\..+", {}, ("num_nextn_predict_layers",)),
)  # fmt: skip
