"""Published models with multi-latent attention or recurrent states: config.json is understood, parameters counted."""

import json

import pytest

from megarl import arguments
from megarl.planning import parameters
from tests.helpers.deepseek_configs import DEEPSEEK_V3 as V3
from tests.helpers.deepseek_configs import DEEPSEEK_YARN as YARN

K2 = V3 | {
    "model_type": "kimi_k2", "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "n_routed_experts": 384,
    "num_attention_heads": 64, "num_key_value_heads": 64, "routed_scaling_factor": 2.827, "vocab_size": 163840,
    "rope_theta": 50000.0, "rope_scaling": YARN | {"factor": 32.0}, "num_nextn_predict_layers": 0,
}  # fmt: skip
V2 = V3 | {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "first_k_dense_replace": 1,
    "hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536, "n_routed_experts": 160,
    "n_shared_experts": 2, "norm_topk_prob": False, "num_experts_per_tok": 6, "num_hidden_layers": 60,
    "rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}, "routed_scaling_factor": 16.0,
    "scoring_func": "softmax", "topk_group": 3, "topk_method": "group_limited_greedy", "vocab_size": 102400,
}  # fmt: skip
V2_LITE = V2 | {
    "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_group": 1, "topk_group": 1,
    "n_routed_experts": 64, "num_attention_heads": 16, "num_hidden_layers": 27, "num_key_value_heads": 16,
    "q_lora_rank": None, "routed_scaling_factor": 1.0, "topk_method": "greedy",
}  # fmt: skip

# What its config.json says beside the defaults of the class.
QWEN3_NEXT = {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "vocab_size": 151936,
              "hidden_size": 2048, "rope_theta": 10000000, "partial_rotary_factor": 0.25, "norm_topk_prob": True,
              "max_position_embeddings": 262144, "full_attention_interval": 4, "num_experts": 512}  # fmt: skip

# Nemotron-H-8B and Nemotron-3-Nano: what their config.json says beside the defaults of the class.
NEMOTRON_H = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "vocab_size": 131072,
    "hidden_size": 4096,
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
}
NEMOTRON_3 = NEMOTRON_H | {
    "hidden_size": 2688, "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "mamba_num_heads": 64, "num_key_value_heads": 2, "n_routed_experts": 128, "num_experts_per_tok": 6,
    "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712, "routed_scaling_factor": 2.5,
}  # fmt: skip
NEMOTRON_3_SUPER = NEMOTRON_3 | {
    "hidden_size": 4096, "mamba_num_heads": 128, "num_attention_heads": 32, "n_routed_experts": 512,
    "hybrid_override_pattern": "MEMEMEM*EMEMEMEM*EMEMEMEM*" + 4 * "EMEMEMEMEM*" + "EMEMEMEM*EMEMEMEME",
    "num_experts_per_tok": 22, "moe_intermediate_size": 2688, "moe_shared_expert_intermediate_size": 5376,
    "moe_latent_size": 1024, "routed_scaling_factor": 5.0,
}  # fmt: skip

# config.json, parameters in all and of one token in billions: 2412.19437, 2507.20534, 2405.04434 and its appendix B.
MODELS = {"V3": (V3, 671, 37), "K2": (K2, 1026, 32), "V2": (V2, 236, 21), "V2-Lite": (V2_LITE, 15.7, 2.4),
          "Qwen3-Next": (QWEN3_NEXT, 79.7, 3.3),  # of its card, which says 80 and 3
          "Nemotron-H-8B": (NEMOTRON_H, 8.1, 8.1), "Nemotron-3-Nano": (NEMOTRON_3, 31.6, 3.2),
          "Nemotron-3-Super": (NEMOTRON_3_SUPER, 121, 12.7)}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_the_published_ones(name, tmp_path):
    config, total, active = MODELS[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    flags = f"--hf-model {tmp_path} --max-prompt-length 8 --max-response-length 8 --global-batch-size 1 --bf16"
    (role,) = arguments.parse(flags.split(), 1, "sft").roles.values()
    found = parameters.parameter_totals(role.megatron, config["vocab_size"], False)
    assert round(found.total / 1e9, 1 if total < 100 else 0) == total
    embedding = config["vocab_size"] * config["hidden_size"]  # not everyone counts it, or the head, as active
    assert found.active - 2 * embedding <= active * 1e9 <= found.active + 0.5e9
