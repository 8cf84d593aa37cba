"""GLM's experts: a configuration as published, and flags of its card."""

import pytest

from tests.helpers.folders.published_families import Published, check

MODELS = {
    "GLM-4.5-Air": Published({
        "architectures": ["Glm4MoeForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
        "first_k_dense_replace": 1, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
        "intermediate_size": 10944, "max_position_embeddings": 131072, "model_type": "glm4_moe",
        "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 128, "n_shared_experts": 1,
        "norm_topk_prob": True, "num_attention_heads": 96, "num_experts_per_tok": 8, "num_hidden_layers": 46,
        "num_key_value_heads": 8, "num_nextn_predict_layers": 1, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05,
        "rope_scaling": None, "rope_theta": 1000000, "routed_scaling_factor": 1.0, "tie_word_embeddings": False,
        "topk_group": 1, "torch_dtype": "bfloat16", "use_qk_norm": False, "vocab_size": 151552,
    }, {"rotary-percent": 0.5, "add-qkv-bias": True, "moe-router-topk-scaling-factor": 1.0}),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_published_configurations(name, tmp_path):
    check(MODELS[name], tmp_path / "published")
