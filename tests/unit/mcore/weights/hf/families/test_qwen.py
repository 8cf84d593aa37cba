"""Qwen: configurations as published, and flags of papers and cards."""

from tests.helpers.folders.published_families import Published, checked

MODELS = {
    "Qwen3-0.6B": Published({
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 1024, "initializer_range": 0.02, "intermediate_size": 3072,
        "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3", "num_attention_heads": 16,
        "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None,
        "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
    }, {"kv-channels": 128, "qk-layernorm": True, "rotary-base": 1000000}, is_tied=True),
    "DeepSeek-R1-Distill-Qwen-1.5B": Published({
        "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "hidden_act": "silu", "hidden_size": 1536,
        "intermediate_size": 8960, "max_position_embeddings": 131072, "max_window_layers": 21, "model_type": "qwen2",
        "num_attention_heads": 12, "num_hidden_layers": 28, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
        "rope_theta": 10000, "sliding_window": 4096, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "use_mrope": False, "use_sliding_window": False, "vocab_size": 151936,
    }),
    "Qwen2.5-VL-7B": Published({
        "architectures": ["Qwen2_5_VLForConditionalGeneration"], "attention_dropout": 0.0, "hidden_act": "silu",
        "hidden_size": 3584, "image_token_id": 151655, "intermediate_size": 18944, "max_position_embeddings": 128000,
        "max_window_layers": 28, "model_type": "qwen2_5_vl", "num_attention_heads": 28, "num_hidden_layers": 28,
        "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768,
        "rope_scaling": {"mrope_section": [16, 24, 24], "type": "mrope"}, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "transformers_version": "4.41.2", "use_sliding_window": False,
        "vision_config": {"depth": 32, "hidden_size": 1280, "num_heads": 16, "in_chans": 3, "out_hidden_size": 3584,
                          "patch_size": 14, "spatial_merge_size": 2, "window_size": 112},
        "vocab_size": 152064,
    }, {"add-qkv-bias": True, "rotary-base": 1000000.0, "kv-channels": 128}),
}  # fmt: skip


test_published_configurations = checked(MODELS)
