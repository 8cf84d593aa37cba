"""DeepSeek's layers: configurations as published, and flags of the papers."""

from tests.helpers.folders.deepseek_configs import DEEPSEEK_V3, KIMI_K2
from tests.helpers.folders.published_families import Published, checked

MODELS = {
    "DeepSeek-V3": Published(DEEPSEEK_V3, {
        "rotary-scaling-factor": 40, "mscale": 1.0, "mscale-all-dim": 1.0, "moe-router-num-groups": 8,
        "moe-layer-freq": str([0] * 3 + [1] * 58).replace(" ", ""),
    }),
    "DeepSeek-V3.2": Published(DEEPSEEK_V3 | {
        "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "index_head_dim": 128,
        "index_n_heads": 64, "index_topk": 2048,
        "quantization_config": DEEPSEEK_V3["quantization_config"] | {"scale_fmt": "ue8m0"},
    }, {
        "rotary-scaling-factor": 40, "mscale-all-dim": 1.0, "moe-router-num-groups": 8,
        "moe-layer-freq": str([0] * 3 + [1] * 58).replace(" ", ""),
    }),
    "Kimi-K2": Published(KIMI_K2),
    "GLM-4.7-Flash": Published({
        "architectures": ["Glm4MoeLiteForCausalLM"], "attention_bias": False, "first_k_dense_replace": 1,
        "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 10240, "kv_lora_rank": 512,
        "max_position_embeddings": 202752, "model_type": "glm4_moe_lite", "moe_intermediate_size": 1536, "n_group": 1,
        "n_routed_experts": 64, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 20,
        "num_experts_per_tok": 4, "num_hidden_layers": 47, "num_key_value_heads": 20, "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 1.0, "q_lora_rank": 768, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1000000, "routed_scaling_factor": 1.8,
        "topk_group": 1, "topk_method": "noaux_tc", "v_head_dim": 256, "vocab_size": 154880,
    }, {
        "kv-lora-rank": 512, "moe-router-topk-scaling-factor": 1.8,
        "moe-layer-freq": str([0] + [1] * 46).replace(" ", ""),
    }),
}  # fmt: skip


test_published_configurations = checked(MODELS)
