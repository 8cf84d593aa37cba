"""Qwen1.5-MoE and Qwen2-MoE (2407.10671): shared experts with a gate; gates of experts need not add up to 1."""

from megarl.mcore.weights.hf.experts import expert_flags, softmax_gates, sparse_layers
from megarl.mcore.weights.hf.family import LAYERS, Family, expert_layers, model_flags, window_flags
from megarl.mcore.weights.hf.model_config import ModelConfig


def flags(config: ModelConfig) -> dict[str, object]:
    """Adds experts, shared experts and biases of queries, keys and values."""
    full = config.whole("max_window_layers", minimum=0)
    found = model_flags(config) | window_flags(config, lambda layer: layer % 2 == 0 and layer < full)
    found |= expert_flags(config, config.whole("moe_intermediate_size"))
    found |= softmax_gates(config) | sparse_layers(config)
    found["moe-shared-expert-intermediate-size"] = config.whole("shared_expert_intermediate_size")
    found["moe-shared-expert-gate"] = True
    return found | ({"add-qkv-bias": True} if config.switch("qkv_bias") else {})


FAMILY = Family(
    model_type="qwen2_moe",
    defaults={
        "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24,
        "num_attention_heads": 16, "num_key_value_heads": 16, "hidden_act": "silu", "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "use_sliding_window": False, "sliding_window": 4096,
        "max_window_layers": 28, "decoder_sparse_step": 1, "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632, "num_experts_per_tok": 4, "num_local_experts": 60,
        "norm_topk_prob": False, "qkv_bias": True,
    },
    layers=LAYERS | expert_layers("mlp.gate", "mlp.experts", "gate_proj", "up_proj", "down_proj", "mlp.shared_expert"),
    flags=flags,
)  # fmt: skip
