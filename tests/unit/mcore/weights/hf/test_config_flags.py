"""config.json files as published models have them, and defaults of classes, against transformers."""

import json
import math

import pytest

from megarl.mcore.weights.hf.families import families
from megarl.mcore.weights.hf.hf_model import read_model
from tests.helpers.deepseek_configs import DEEPSEEK_V3, DEEPSEEK_YARN
from tests.helpers.hf_quantized import MXFP4_CONFIG

LLAMA_3 = {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
           "rope_type": "llama3"}  # fmt: skip

# Entries of config.json as the models' authors published them.
PUBLISHED = {
    "Qwen3-0.6B": {
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 1024, "initializer_range": 0.02, "intermediate_size": 3072,
        "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3", "num_attention_heads": 16,
        "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None,
        "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
    },
    "Llama-3.2-1B": {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "head_dim": 64, "hidden_act": "silu",
        "hidden_size": 2048, "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": False,
        "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8,
        "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": LLAMA_3, "rope_theta": 500000.0,
        "tie_word_embeddings": True, "torch_dtype": "bfloat16", "vocab_size": 128256,
    },
    "DeepSeek-R1-Distill-Qwen-1.5B": {
        "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "hidden_act": "silu", "hidden_size": 1536,
        "intermediate_size": 8960, "max_position_embeddings": 131072, "max_window_layers": 21, "model_type": "qwen2",
        "num_attention_heads": 12, "num_hidden_layers": 28, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
        "rope_theta": 10000, "sliding_window": 4096, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "use_mrope": False, "use_sliding_window": False, "vocab_size": 151936,
    },
    "DeepSeek-V3": DEEPSEEK_V3,
    "DeepSeek-V3.2": DEEPSEEK_V3 | {
        "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "index_head_dim": 128,
        "index_n_heads": 64, "index_topk": 2048,
        "quantization_config": DEEPSEEK_V3["quantization_config"] | {"scale_fmt": "ue8m0"},
    },
    "Kimi-K2": DEEPSEEK_V3 | {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", "first_k_dense_replace": 1, "n_group": 1,
        "n_routed_experts": 384, "num_attention_heads": 64, "num_key_value_heads": 64, "num_nextn_predict_layers": 0,
        "routed_scaling_factor": 2.827, "topk_group": 1, "vocab_size": 163840,
        "rope_scaling": DEEPSEEK_YARN | {"beta_fast": 1.0, "factor": 32.0},
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    },
    "GLM-4.5-Air": {
        "architectures": ["Glm4MoeForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
        "first_k_dense_replace": 1, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
        "intermediate_size": 10944, "max_position_embeddings": 131072, "model_type": "glm4_moe",
        "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 128, "n_shared_experts": 1,
        "norm_topk_prob": True, "num_attention_heads": 96, "num_experts_per_tok": 8, "num_hidden_layers": 46,
        "num_key_value_heads": 8, "num_nextn_predict_layers": 1, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05,
        "rope_scaling": None, "rope_theta": 1000000, "routed_scaling_factor": 1.0, "tie_word_embeddings": False,
        "topk_group": 1, "torch_dtype": "bfloat16", "use_qk_norm": False, "vocab_size": 151552,
    },
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"], "attention_bias": True, "experts_per_token": 4, "head_dim": 64,
        "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096, "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * 12, "max_position_embeddings": 131072,
        "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24,
        "num_key_value_heads": 8, "num_local_experts": 32, "rms_norm_eps": 1e-05,
        "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn", "truncate": False,
                         "original_max_position_embeddings": 4096},
        "rope_theta": 150000, "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False,
        "vocab_size": 201088, "quantization_config": MXFP4_CONFIG,
    },
    "gemma-2-2b": {
        "architectures": ["Gemma2ForCausalLM"], "attention_bias": False, "attn_logit_softcapping": 50.0,
        "cache_implementation": "hybrid", "final_logit_softcapping": 30.0, "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2304,
        "intermediate_size": 9216, "max_position_embeddings": 8192, "model_type": "gemma2", "num_attention_heads": 8,
        "num_hidden_layers": 26, "num_key_value_heads": 4, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0, "sliding_window": 4096, "torch_dtype": "float32", "vocab_size": 256000,
    },
    "gemma-3-1b-it": {
        "architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "attn_logit_softcapping": None,
        "eos_token_id": [1, 106], "final_logit_softcapping": None, "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152, "intermediate_size": 6912,
        "max_position_embeddings": 32768, "model_type": "gemma3_text", "num_attention_heads": 4,
        "num_hidden_layers": 26, "num_key_value_heads": 1, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512,
        "sliding_window_pattern": 6, "torch_dtype": "bfloat16", "vocab_size": 262144,
    },
    "gemma-3-4b-it": {
        "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999, "eoi_token_index": 256000,
        "eos_token_id": [1, 106], "image_token_index": 262144, "initializer_range": 0.02, "mm_tokens_per_image": 256,
        "model_type": "gemma3", "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0",
        "text_config": {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
                        "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                        "sliding_window": 1024},
        "vision_config": {"hidden_size": 1152, "image_size": 896, "intermediate_size": 4304, "patch_size": 14,
                          "model_type": "siglip_vision_model", "num_attention_heads": 16, "num_hidden_layers": 27,
                          "vision_use_head": False},
    },
    "Olmo-3-7B": {
        "architectures": ["Olmo3ForCausalLM"], "attention_bias": False, "hidden_act": "silu", "hidden_size": 4096,
        "intermediate_size": 11008, "max_position_embeddings": 65536, "model_type": "olmo3", "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 32, "rms_norm_eps": 1e-06, "rope_theta": 500000,
        "rope_scaling": {"attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0,
                         "original_max_position_embeddings": 8192, "rope_type": "yarn"},
        "sliding_window": 4096, "tie_word_embeddings": False, "vocab_size": 100278,
    },
    "phi-4": {
        "architectures": ["Phi3ForCausalLM"], "attention_bias": False, "hidden_act": "silu", "hidden_size": 5120,
        "intermediate_size": 17920, "max_position_embeddings": 16384, "model_type": "phi3", "num_attention_heads": 40,
        "num_hidden_layers": 40, "num_key_value_heads": 10, "original_max_position_embeddings": 16384,
        "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 250000, "sliding_window": None,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 100352,
    },
    "Mixtral-8x7B": {
        "architectures": ["MixtralForCausalLM"], "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
        "max_position_embeddings": 32768, "model_type": "mixtral", "num_attention_heads": 32, "num_experts_per_tok": 2,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8, "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0, "sliding_window": None, "tie_word_embeddings": False, "vocab_size": 32000,
    },
    "MiniMax-M2": {
        "architectures": ["MiniMaxM2ForCausalLM"], "attn_type_list": [1] * 62, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 3072, "intermediate_size": 1536, "max_position_embeddings": 196608, "model_type": "minimax_m2",
        "mtp_transformer_layers": 1, "num_attention_heads": 48, "num_experts_per_tok": 8, "num_hidden_layers": 62,
        "num_key_value_heads": 8, "num_local_experts": 256, "num_mtp_modules": 3, "qk_norm_type": "per_layer",
        "rms_norm_eps": 1e-06, "rope_theta": 5000000, "rotary_dim": 64, "scoring_func": "sigmoid",
        "shared_intermediate_size": 0, "tie_word_embeddings": False, "use_mtp": True, "use_qk_norm": True,
        "use_routing_bias": True, "vocab_size": 200064,
    },
    "Qwen2.5-VL-7B": {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"], "attention_dropout": 0.0, "hidden_act": "silu",
        "hidden_size": 3584, "image_token_id": 151655, "intermediate_size": 18944, "max_position_embeddings": 128000,
        "max_window_layers": 28, "model_type": "qwen2_5_vl", "num_attention_heads": 28, "num_hidden_layers": 28,
        "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768,
        "rope_scaling": {"mrope_section": [16, 24, 24], "type": "mrope"}, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "transformers_version": "4.41.2", "use_sliding_window": False,
        "vision_config": {"depth": 32, "hidden_size": 1280, "num_heads": 16, "in_chans": 3, "out_hidden_size": 3584,
                          "patch_size": 14, "spatial_merge_size": 2, "window_size": 112},
        "vocab_size": 152064,
    },
    "GLM-4.7-Flash": {
        "architectures": ["Glm4MoeLiteForCausalLM"], "attention_bias": False, "first_k_dense_replace": 1,
        "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 10240, "kv_lora_rank": 512,
        "max_position_embeddings": 202752, "model_type": "glm4_moe_lite", "moe_intermediate_size": 1536, "n_group": 1,
        "n_routed_experts": 64, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 20,
        "num_experts_per_tok": 4, "num_hidden_layers": 47, "num_key_value_heads": 20, "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 1.0, "q_lora_rank": 768, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1000000, "routed_scaling_factor": 1.8,
        "topk_group": 1, "topk_method": "noaux_tc", "v_head_dim": 256, "vocab_size": 154880,
    },
    "Phi-4-mini": {
        "architectures": ["Phi3ForCausalLM"], "attention_bias": False, "hidden_act": "silu", "hidden_size": 3072,
        "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "phi3",
        "num_attention_heads": 24, "num_hidden_layers": 32, "num_key_value_heads": 8, "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
        "rope_scaling": {"long_factor": [1.0 + i for i in range(48)], "short_factor": [1.0] * 48, "type": "longrope"},
        "sliding_window": 262144, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "vocab_size": 200064,
    },
    "SmolLM3-3B": {
        "architectures": ["SmolLM3ForCausalLM"], "attention_bias": False, "hidden_act": "silu", "hidden_size": 2048,
        "intermediate_size": 11008, "max_position_embeddings": 65536, "max_window_layers": 28, "mlp_bias": False,
        "model_type": "smollm3", "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 9,
        "num_attention_heads": 16, "num_hidden_layers": 36, "num_key_value_heads": 4, "rms_norm_eps": 1e-06,
        "rope_scaling": None, "rope_theta": 5000000.0, "sliding_window": None, "tie_word_embeddings": True,
        "torch_dtype": "bfloat16", "use_sliding_window": False, "vocab_size": 128256,
    },
}  # fmt: skip

# Flags that were read off the models' papers and cards, for what the comparison with the class cannot show.
KNOWN = {
    "Qwen3-0.6B": {"kv-channels": 128, "qk-layernorm": True, "rotary-base": 1000000},
    "Llama-3.2-1B": {"use-rope-scaling": True, "rope-scaling-factor": 32.0, "rotary-base": 500000.0},
    "DeepSeek-V3": {"rotary-scaling-factor": 40, "mscale": 1.0, "mscale-all-dim": 1.0, "moe-router-num-groups": 8,
                    "moe-layer-freq": str([0] * 3 + [1] * 58).replace(" ", "")},
    "DeepSeek-V3.2": {"rotary-scaling-factor": 40, "mscale-all-dim": 1.0, "moe-router-num-groups": 8,
                      "moe-layer-freq": str([0] * 3 + [1] * 58).replace(" ", "")},
    "GLM-4.5-Air": {"rotary-percent": 0.5, "add-qkv-bias": True, "moe-router-topk-scaling-factor": 1.0},
    "gpt-oss-20b": {"window-size": "127,0", "yarn-original-max-position-embeddings": 4096, "num-experts": 32,
                    "window-attn-skip-freq": str([1, 0] * 12).replace(" ", "")},
    "gemma-2-2b": {"window-attn-skip-freq": str([1, 0] * 13).replace(" ", ""), "attn-logit-softcapping": 50.0},
    "gemma-3-1b-it": {"window-rotary-base": 10000, "rotary-base": 1000000, "window-size": "511,0",
                      "window-attn-skip-freq": str(([1] * 5 + [0]) * 4 + [1, 1]).replace(" ", "")},
    "gemma-3-4b-it": {"window-rotary-base": 10000, "rotary-seq-len-interpolation-factor": 8.0, "kv-channels": 256,
                      "window-attn-skip-freq": str(([1] * 5 + [0]) * 5 + [1] * 4).replace(" ", "")},
    "MiniMax-M2": {"rotary-percent": 0.5, "rotary-base": 5000000, "moe-router-score-function": "sigmoid"},
    "Qwen2.5-VL-7B": {"add-qkv-bias": True, "rotary-base": 1000000.0, "kv-channels": 128},
    "GLM-4.7-Flash": {"kv-lora-rank": 512, "moe-router-topk-scaling-factor": 1.8,
                      "moe-layer-freq": str([0] + [1] * 46).replace(" ", "")},
    "SmolLM3-3B": {"no-rope-freq": str([0, 0, 0, 1] * 9).replace(" ", ""), "rotary-base": 5000000.0},
    "Phi-4-mini": {"rotary-percent": 0.75, "rotary-divisors": ",".join(["1.0"] * 48),
                   "rotary-attention-factor": math.sqrt(1 + math.log(32) / math.log(4096))},
    "Olmo-3-7B": {"rotary-scaling-factor": 8.0, "window-rotary-base": 500000,
                  "window-attn-skip-freq": str([1, 1, 1, 0] * 8).replace(" ", "")},
}  # fmt: skip
TIED = {"Qwen3-0.6B", "Llama-3.2-1B", "gemma-2-2b", "gemma-3-1b-it", "gemma-3-4b-it", "SmolLM3-3B", "Phi-4-mini"}


def flags_of(folder, entries: dict) -> dict[str, object]:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(entries))
    return read_model(str(folder), "--hf-model", 64).flags


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations(name, tmp_path):
    flags = flags_of(tmp_path / "published", PUBLISHED[name])
    assert flags.items() >= KNOWN.get(name, {}).items()
    assert ("untie-embeddings-and-output-weights" in flags) == (name not in TIED)
    shapes = {"num-layers": "num_hidden_layers", "hidden-size": "hidden_size", "norm-epsilon": "rms_norm_eps",
              "num-attention-heads": "num_attention_heads"}  # fmt: skip
    of_text = PUBLISHED[name].get("text_config", PUBLISHED[name])  # which may leave out what the class has
    assert all(flags[flag] == of_text.get(key, flags[flag]) for flag, key in shapes.items())
    windows = ("gpt-oss-20b", "gemma-2-2b", "gemma-3-1b-it", "gemma-3-4b-it", "Olmo-3-7B", "Phi-4-mini")
    assert ("window-size" in flags) == (name in windows)


def of_class(model_type: str):
    """transformers' class with its defaults; without them, what a type without a class of its own needs."""
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING["deepseek_v3" if model_type == "kimi_k2" else model_type]()


@pytest.mark.parametrize("model_type", families())
def test_absent_entries_are_those_of_transformers(model_type, tmp_path):
    """A file with the type alone, and one with all that the class writes, are the same model."""
    needed = {"model_type": model_type}
    if model_type == "deepseek_v2":
        needed |= {"num_experts_per_tok": 6, "moe_intermediate_size": 1408}
    if model_type == "dots1":
        needed |= {"num_experts_per_tok": 6, "n_routed_experts": 128, "n_shared_experts": 2, "norm_topk_prob": True}
    if families()[model_type].multimodal:
        needed["text_config"] = {"model_type": families()[model_type].config_type}
    config = type(of_class(model_type)).from_dict(needed)
    short, whole = (
        flags_of(tmp_path / "short", needed),
        flags_of(tmp_path / "whole", config.to_dict() | {"model_type": model_type}),
    )
    assert short == whole
    assert ("untie-embeddings-and-output-weights" in short) == (not config.tie_word_embeddings)
    if short["position-embedding-type"] != "none":
        rope = config.get_text_config().rope_parameters
        assert short["rotary-base"] == rope.get("full_attention", rope)["rope_theta"]
    kinds = getattr(config.get_text_config(), "layer_types", None)
    if kinds and "sliding_attention" in kinds:
        windows = [int(kind == "sliding_attention") for kind in kinds]
        pattern = None if all(windows) else str(windows).replace(" ", "")
        assert short.get("window-attn-skip-freq") == pattern and "window-size" in short


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "qwen2_moe", "olmo2"])
def test_scaling_beside_present_parameters_is_read_as_transformers_reads_it(model_type, tmp_path):
    """What a user gets who adds the `rope_scaling` of a model's card to a file of transformers 5."""
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    entries = of_class(model_type).to_dict() | {"rope_scaling": yarn, "max_position_embeddings": 4096}
    flags = flags_of(tmp_path / "folder", entries)
    assert flags["rotary-scaling-factor"] == 4.0 and flags["yarn-original-max-position-embeddings"] == 64
