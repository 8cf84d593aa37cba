"""GLM-4.5 and 4.6 (2508.06471): sigmoid gates with a correction bias, shared experts, first layers dense."""

from megarl.mcore.weights.hf.experts import expert_flags, layer_pattern, sigmoid_gates
from megarl.mcore.weights.hf.family import LAYERS, Family, expert_layers, model_flags
from megarl.mcore.weights.hf.model_config import ModelConfig


def flags(config: ModelConfig) -> dict[str, object]:
    """Adds experts, shared experts, biases of queries, keys and values, and norms of queries and keys."""
    dense, layers = config.whole("first_k_dense_replace", minimum=0), config.whole("num_hidden_layers")
    found = model_flags(config) | expert_flags(config, config.whole("moe_intermediate_size"))
    found |= sigmoid_gates(config) | layer_pattern([i >= dense for i in range(layers)])
    shared = config.whole("n_shared_experts") * config.whole("moe_intermediate_size")
    found["moe-shared-expert-intermediate-size"] = shared
    if config.switch("attention_bias"):
        found["add-qkv-bias"] = True
    return found | ({"qk-layernorm": True} if config.switch("use_qk_norm") else {})


FAMILY = Family(
    model_type="glm4_moe",
    defaults={
        "vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 10944, "num_hidden_layers": 46,
        "num_attention_heads": 96, "num_key_value_heads": 8, "hidden_act": "silu", "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "moe_intermediate_size": 1408,
        "num_experts_per_tok": 8, "n_shared_experts": 1, "n_routed_experts": 128, "routed_scaling_factor": 1.0,
        "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "norm_topk_prob": True,
    },
    layers=LAYERS | expert_layers("mlp.gate", "mlp.experts", "gate_proj", "up_proj", "down_proj"),
    flags=flags,
)  # fmt: skip
