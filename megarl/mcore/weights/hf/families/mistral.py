"""Mistral (2310.06825)."""

from megarl.mcore.weights.hf.family import LAYERS, Family, model_flags, window_flags
from megarl.mcore.weights.hf.model_config import ModelConfig


def flags(config: ModelConfig) -> dict[str, object]:
    """Those of all families."""
    return model_flags(config) | window_flags(config)


FAMILY = Family(
    model_type="mistral",
    defaults={
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_act": "silu", "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "sliding_window": 4096,
    },
    layers=LAYERS,
    flags=flags,
)  # fmt: skip
