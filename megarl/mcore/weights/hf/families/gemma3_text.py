"""Gemma 3, text (2503.19786): norms of heads; five layers with a window and a rotation of their own, one without."""

from megarl.mcore.weights.hf.family import SANDWICH, Family, window_flags
from megarl.mcore.weights.hf.gemma import gemma_flags
from megarl.mcore.weights.hf.model_config import ModelConfig
from megarl.mcore.weights.hf.rotary import rotary_flags_by_kind


def flags(config: ModelConfig) -> dict[str, object]:
    """Those of Gemma, the norms of queries and keys, and the windows."""
    period = config.whole("sliding_window_pattern")
    found = gemma_flags(config, lambda config: rotary_flags_by_kind(config, "rope_local_base_freq"))
    return found | window_flags(config, lambda layer: (layer + 1) % period != 0) | {"qk-layernorm": True}


FAMILY = Family(
    model_type="gemma3_text",
    defaults={
        "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0, "query_pre_attn_scalar": 256, "sliding_window": 4096,
        "sliding_window_pattern": 6,
    },
    layers=SANDWICH,
    flags=flags,
)  # fmt: skip
