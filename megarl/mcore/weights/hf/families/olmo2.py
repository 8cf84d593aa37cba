"""OLMo 2 (2501.00656): norms after attention and MLP alone, and of queries and keys over all heads."""

from megarl.mcore.weights.hf.family import POST_NORM, Family, model_flags
from megarl.mcore.weights.hf.model_config import ModelConfig


def flags(config: ModelConfig) -> dict[str, object]:
    """Adds the norms."""
    config.require("attention_bias", False, None)
    return model_flags(config) | {"layernorm-position": "post", "qk-layernorm-all-heads": True}


FAMILY = Family(
    model_type="olmo2",
    defaults={
        "vocab_size": 50304, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "hidden_act": "silu", "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
    },
    layers=POST_NORM,
    flags=flags,
)  # fmt: skip
