"""Tensors of a folder become the weights of transformers' module, and back, in each way in which folders store them."""

import json

import pytest
import torch
from safetensors.torch import load_file

from megarl.mcore.any_model import source
from megarl.mcore.any_model.conversions import Conversions, converted
from tests.helpers.folders import any_types
from tests.helpers.tiers import by_default

# Experts stored one by one; names that the class no longer has; heads that are embeddings; buffers.
KINDS = ("qwen3_moe", "mixtral", "ernie4_5_moe", "gemma2", "gpt2", "gemma4_text", "longcat_flash", "gpt_oss")


def read(folder):
    return {name: each for file in sorted(folder.glob("*.safetensors")) for name, each in load_file(file).items()}


def conversions_of(folder, tensors):
    config = json.loads((folder / "config.json").read_text())
    found = source.of_config(source.CONFIG_MAPPING[config["model_type"]].from_dict(config))
    module = found.module(torch.float32)
    return Conversions(module, {name: tuple(each.shape) for name, each in tensors.items()})


@pytest.mark.parametrize("kind", by_default(KINDS, ("qwen3_moe", "gemma2")))
def test_weights_are_those_of_the_module_and_become_the_same_tensors(kind, tmp_path):
    module = any_types.save(kind, tmp_path / kind)
    tensors = read(tmp_path / kind)
    found = conversions_of(tmp_path / kind, tensors)
    assert found.missing == found.unknown == []
    written = {}
    for group in found.groups:
        made = converted(group.conversion, next(iter(group.weights)), group.sources, tensors.__getitem__, found.module)
        assert {name: tuple(each.shape) for name, each in made.items()} == group.weights
        for name, each in made.items():
            assert torch.equal(each, module.state_dict()[name])
        written |= found.reverted(made)
    assert written.keys() == tensors.keys()
    assert all(torch.equal(each, tensors[name]) for name, each in written.items())


def test_experts_are_stored_one_by_one(tmp_path):
    any_types.save("qwen3_moe", tmp_path / "one")
    found = conversions_of(tmp_path / "one", read(tmp_path / "one"))
    (group,) = (each for each in found.groups if "model.layers.0.mlp.experts.gate_up_proj" in each.weights)
    assert len(group.sources) == 8 and "model.layers.0.mlp.experts.3.up_proj.weight" in group.sources


@pytest.mark.parametrize("is_stored", [False, True])
def test_a_tied_head_may_be_stored(is_stored, tmp_path):
    any_types.save("gemma2", tmp_path / "tied")
    tensors = read(tmp_path / "tied")
    assert "lm_head.weight" not in tensors
    if is_stored:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    found = conversions_of(tmp_path / "tied", tensors)
    assert found.missing == found.unknown == []
    assert {name for group in found.groups for name in group.sources} == tensors.keys()


def test_missing_and_unknown_tensors_are_named(tmp_path):
    any_types.save("gemma2", tmp_path / "wrong")
    tensors = read(tmp_path / "wrong")
    tensors["model.layers.6.mlp.up_proj.weight"] = tensors.pop("model.layers.5.mlp.up_proj.weight")
    found = conversions_of(tmp_path / "wrong", tensors)
    assert found.missing == ["model.layers.5.mlp.up_proj.weight"]
    assert found.unknown == ["model.layers.6.mlp.up_proj.weight"]
