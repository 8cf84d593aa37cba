"""Qwen3-MoE (2505.09388)."""

from megarl.mcore.weights.hf.experts import expert_flags, softmax_gates, sparse_layers
from megarl.mcore.weights.hf.family import LAYERS, Family, expert_layers, model_flags, window_flags
from megarl.mcore.weights.hf.model_config import ModelConfig


def flags(config: ModelConfig) -> dict[str, object]:
    """Adds experts and the norms of queries and keys."""
    config.require("attention_bias", False, None)
    found = model_flags(config) | window_flags(config)
    found |= expert_flags(config, config.whole("moe_intermediate_size"))
    return found | softmax_gates(config) | sparse_layers(config) | {"qk-layernorm": True}


FAMILY = Family(
    model_type="qwen3_moe",
    defaults={
        "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24,
        "num_attention_heads": 32, "num_key_value_heads": 4, "hidden_act": "silu", "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "use_sliding_window": False, "sliding_window": 4096,
        "decoder_sparse_step": 1, "moe_intermediate_size": 768, "num_experts_per_tok": 8, "num_local_experts": 128,
        "norm_topk_prob": False,
    },
    layers=LAYERS | expert_layers("mlp.gate", "mlp.experts", "gate_proj", "up_proj", "down_proj"),
    flags=flags,
)  # fmt: skip
