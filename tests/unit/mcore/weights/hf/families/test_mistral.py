"""Mixtral's configuration as published."""

import pytest

from tests.helpers.folders.published_families import Published, check

MODELS = {
    "Mixtral-8x7B": Published({
        "architectures": ["MixtralForCausalLM"], "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
        "max_position_embeddings": 32768, "model_type": "mixtral", "num_attention_heads": 32, "num_experts_per_tok": 2,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8, "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0, "sliding_window": None, "tie_word_embeddings": False, "vocab_size": 32000,
    }),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_published_configurations(name, tmp_path):
    check(MODELS[name], tmp_path / "published")
