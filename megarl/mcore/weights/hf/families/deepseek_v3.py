"""DeepSeek-V3 and R1 (2412.19437), Moonlight: multi-latent attention, sigmoid gates with a correction bias."""

from megarl.mcore.weights.hf.deepseek import deepseek_flags
from megarl.mcore.weights.hf.experts import deepseek_gates
from megarl.mcore.weights.hf.family import EXPERT_LAYERS, LATENT, PREDICTION_LAYERS, Family
from megarl.mcore.weights.hf.model_config import ModelConfig


def flags(config: ModelConfig) -> dict[str, object]:
    """Adds the routers' flags; a group's score is the sum of its two best experts."""
    config.require("rope_interleave", True)
    return deepseek_flags(config) | deepseek_gates(config)


FAMILY = Family(
    model_type="deepseek_v3",
    layers=LATENT | EXPERT_LAYERS,
    flags=flags,
    prediction=PREDICTION_LAYERS,
)
