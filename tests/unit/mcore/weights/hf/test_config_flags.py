"""Defaults of a config.json's class, and entries of older files, as transformers reads them, for every family."""

import pytest

from megarl.mcore.weights.hf.families import families
from tests.helpers.folders.published_families import flags_of


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
