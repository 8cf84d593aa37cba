"""Gemma 2 (2408.00118): windows in every second layer, softcaps."""

from megarl.mcore.weights.hf.family import SANDWICH, Family, window_flags
from megarl.mcore.weights.hf.gemma import gemma_flags
from megarl.mcore.weights.hf.model_config import ModelConfig


def flags(config: ModelConfig) -> dict[str, object]:
    """Those of Gemma, and the windows."""
    return gemma_flags(config) | window_flags(config, lambda layer: layer % 2 == 0)


FAMILY = Family(
    model_type="gemma2",
    defaults={
        "vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "query_pre_attn_scalar": 256,
        "sliding_window": 4096, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
    },
    layers=SANDWICH,
    flags=flags,
)  # fmt: skip
