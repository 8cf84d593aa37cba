"""Qwen3 (2505.09388): norms of each query and key head."""

from megarl.mcore.weights.hf.family import LAYERS, Family, model_flags, window_flags
from megarl.mcore.weights.hf.model_config import ModelConfig


def flags(config: ModelConfig) -> dict[str, object]:
    """Adds the norms."""
    config.require("attention_bias", False, None)
    full = config.whole("max_window_layers", minimum=0)
    return model_flags(config) | window_flags(config, lambda layer: layer >= full) | {"qk-layernorm": True}


FAMILY = Family(
    model_type="qwen3",
    defaults={
        "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128, "hidden_act": "silu",
        "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "use_sliding_window": False,
        "sliding_window": 4096, "max_window_layers": 28,
    },
    layers=LAYERS,
    flags=flags,
)  # fmt: skip
