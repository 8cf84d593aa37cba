"""DeepSeek-V2 and V2-Lite (2405.04434): multi-latent attention, gates of a softmax over all experts."""

from megarl.mcore.weights.hf.deepseek import deepseek_flags
from megarl.mcore.weights.hf.experts import softmax_gates
from megarl.mcore.weights.hf.family import LATENT, Family, expert_layers
from megarl.mcore.weights.hf.model_config import ModelConfig


def flags(config: ModelConfig) -> dict[str, object]:
    """Adds the routers' flags; a group's score is its best expert's."""
    config.require("mlp_bias", False, None)
    config.require("norm_topk_prob", False, None)
    config.require("scoring_func", "softmax", None)
    config.require("topk_method", "greedy", "group_limited_greedy")
    found = deepseek_flags(config) | softmax_gates(config)
    found["moe-router-topk-scaling-factor"] = config.number("routed_scaling_factor")
    if config.get("topk_method") == "group_limited_greedy":
        found["moe-router-num-groups"] = config.whole("n_group")
        found["moe-router-group-topk"] = config.whole("topk_group")
        found["moe-router-group-score"] = "max"
    return found


FAMILY = Family(
    model_type="deepseek_v2",
    defaults={
        "vocab_size": 102400, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "hidden_act": "silu", "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "first_k_dense_replace": 0, "kv_lora_rank": 512, "q_lora_rank": 1536,
        "n_routed_experts": 64, "n_shared_experts": 2, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "routed_scaling_factor": 1.0, "topk_method": "greedy", "norm_topk_prob": False, "v_head_dim": 128,
        "moe_intermediate_size": 1407,
    },
    layers=LATENT | expert_layers("mlp.gate", "mlp.experts", "gate_proj", "up_proj", "down_proj"),
    flags=flags,
)  # fmt: skip
