"""DeepSeek-V3 and R1 (2412.19437), Moonlight: multi-latent attention, sigmoid gates with a correction bias."""

from megarl.mcore.weights.hf.deepseek import deepseek_flags
from megarl.mcore.weights.hf.experts import sigmoid_gates
from megarl.mcore.weights.hf.family import LATENT, Family, expert_layers
from megarl.mcore.weights.hf.model_config import ModelConfig


def flags(config: ModelConfig) -> dict[str, object]:
    """Adds the routers' flags; a group's score is the sum of its two best experts."""
    config.require("rope_interleave", True)
    config.require("scoring_func", "sigmoid", None)
    config.require("topk_method", "noaux_tc", None)
    return deepseek_flags(config) | sigmoid_gates(config)


FAMILY = Family(
    model_type="deepseek_v3",
    defaults={
        "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
        "num_hidden_layers": 61, "num_attention_heads": 128, "n_shared_experts": 1, "n_routed_experts": 256,
        "routed_scaling_factor": 2.5, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64,
        "v_head_dim": 128, "qk_nope_head_dim": 128, "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8,
        "first_k_dense_replace": 3, "norm_topk_prob": True, "hidden_act": "silu", "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "rope_interleave": True,
    },
    layers=LATENT | expert_layers("mlp.gate", "mlp.experts", "gate_proj", "up_proj", "down_proj"),
    flags=flags,
)  # fmt: skip
