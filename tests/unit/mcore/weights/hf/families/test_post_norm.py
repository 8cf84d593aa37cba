"""Gemma and OLMo: configurations as published, and flags of papers and cards."""

from tests.helpers.folders.published_families import Published, checked

MODELS = {
    "gemma-2-2b": Published({
        "architectures": ["Gemma2ForCausalLM"], "attention_bias": False, "attn_logit_softcapping": 50.0,
        "cache_implementation": "hybrid", "final_logit_softcapping": 30.0, "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2304,
        "intermediate_size": 9216, "max_position_embeddings": 8192, "model_type": "gemma2", "num_attention_heads": 8,
        "num_hidden_layers": 26, "num_key_value_heads": 4, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0, "sliding_window": 4096, "torch_dtype": "float32", "vocab_size": 256000,
    }, {
        "window-attn-skip-freq": str([1, 0] * 13).replace(" ", ""), "attn-logit-softcapping": 50.0,
    }, is_tied=True, has_windows=True),
    "gemma-3-1b-it": Published({
        "architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "attn_logit_softcapping": None,
        "eos_token_id": [1, 106], "final_logit_softcapping": None, "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152, "intermediate_size": 6912,
        "max_position_embeddings": 32768, "model_type": "gemma3_text", "num_attention_heads": 4,
        "num_hidden_layers": 26, "num_key_value_heads": 1, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512,
        "sliding_window_pattern": 6, "torch_dtype": "bfloat16", "vocab_size": 262144,
    }, {
        "window-rotary-base": 10000, "rotary-base": 1000000, "window-size": "511,0",
        "window-attn-skip-freq": str(([1] * 5 + [0]) * 4 + [1, 1]).replace(" ", ""),
    }, is_tied=True, has_windows=True),
    "gemma-3-4b-it": Published({
        "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999, "eoi_token_index": 256000,
        "eos_token_id": [1, 106], "image_token_index": 262144, "initializer_range": 0.02, "mm_tokens_per_image": 256,
        "model_type": "gemma3", "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0",
        "text_config": {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
                        "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                        "sliding_window": 1024},
        "vision_config": {"hidden_size": 1152, "image_size": 896, "intermediate_size": 4304, "patch_size": 14,
                          "model_type": "siglip_vision_model", "num_attention_heads": 16, "num_hidden_layers": 27,
                          "vision_use_head": False},
    }, {
        "window-rotary-base": 10000, "rotary-seq-len-interpolation-factor": 8.0, "kv-channels": 256,
        "window-attn-skip-freq": str(([1] * 5 + [0]) * 5 + [1] * 4).replace(" ", ""),
    }, is_tied=True, has_windows=True),
    "Olmo-3-7B": Published({
        "architectures": ["Olmo3ForCausalLM"], "attention_bias": False, "hidden_act": "silu", "hidden_size": 4096,
        "intermediate_size": 11008, "max_position_embeddings": 65536, "model_type": "olmo3", "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 32, "rms_norm_eps": 1e-06, "rope_theta": 500000,
        "rope_scaling": {"attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0,
                         "original_max_position_embeddings": 8192, "rope_type": "yarn"},
        "sliding_window": 4096, "tie_word_embeddings": False, "vocab_size": 100278,
    }, {
        "rotary-scaling-factor": 8.0, "window-rotary-base": 500000,
        "window-attn-skip-freq": str([1, 1, 1, 0] * 8).replace(" ", ""),
    }, has_windows=True),
}  # fmt: skip


test_published_configurations = checked(MODELS)
