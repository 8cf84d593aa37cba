"""What is known of a folder's module before it has weights: names, shapes, parts of ranks, and what is refused."""

import math

import pytest
from safetensors.torch import load_file

from megarl.mcore.any_model.attention import Unsupported, mean_cache
from megarl.mcore.any_model.folder_module import FolderModule
from megarl.planning import memory
from tests.helpers.folders import any_types


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("module") / "gemma2"  # a tied head, two kinds of layers
    any_types.save("gemma2", path, num_hidden_layers=2)
    return path


def test_a_checkpoint_has_the_tensors_of_the_folder(folder):
    module, stored = FolderModule(folder), load_file(folder / "model.safetensors")
    names = [weight.name for weight in module.rank_weights(False, 1, 4)]
    assert sorted(names) == sorted(f"hf.{name}" for name in stored)  # the tied head once
    shapes = module.checkpoint_shapes("actor", False)
    assert shapes == {f"actor.hf.{name}": tuple(each.shape) for name, each in stored.items()}
    of_values = module.checkpoint_shapes("critic", True)
    assert {name.partition(".")[2] for name in shapes} < {name.partition(".")[2] for name in of_values}
    (head,) = {name.partition(".")[2] for name in of_values} - {name.partition(".")[2] for name in shapes}
    assert of_values[f"critic.{head}"] == (1, 64)


def test_ranks_hold_parts_of_the_weights(folder):
    whole, half = ({each.name: math.prod(each.shape) for each in FolderModule(folder).rank_weights(False, ranks, 4)}
                   for ranks in (1, 2))  # fmt: skip
    assert whole.keys() == half.keys()
    split = {name for name in whole if half[name] < whole[name]}
    assert {whole[name] / half[name] for name in split} == {2} and "hf.model.layers.0.mlp.up_proj.weight" in split
    assert not any("norm" in name for name in split)


def test_weights_belong_to_layers(folder):
    weights = FolderModule(folder).rank_weights(False, 1, 4)
    assert {each.layer for each in weights} == {None, 0, 1} and all(len(each.layers) < 2 for each in weights)
    of_layers = [sum(4 * each.elements for each in weights if each.layer == layer) for layer in (None, 0, 1)]
    assert memory.gathered([weights]) == sum(of_layers)
    assert memory.gathered([[*weights, weights[-2]._replace(layers=(0, 1))]]) == sum(of_layers)  # each rank has it


def test_what_cannot_be_split_is_named(folder):
    module = FolderModule(folder)
    assert module.split_problem(2, False) is None
    assert "has 4 heads with 2 keys, which it does not divide" in module.split_problem(3, False)


def test_the_slots_and_the_mean_of_their_caches(folder, tmp_path):
    module = FolderModule(folder)
    slots = module.reach().slots
    assert [slot.window for slot in slots] == [8, None] and mean_cache(slots, 1) == (1, 32)
    assert module.routed_layers()[1] == "Gemma2ForCausalLM: calls no experts by transformers' interface"
    any_types.small_config("gemma4_text").save_pretrained(tmp_path)
    assert mean_cache(FolderModule(tmp_path).reach().slots, 1) == (1, 32)  # of 2 · 16 and of 1 · 32 channels


def test_a_type_that_does_not_run_is_refused_each_time(tmp_path):
    any_types.small_config("doge").save_pretrained(tmp_path)
    for _ in range(2):  # the second answer is remembered
        with pytest.raises(Unsupported, match="^DogeAttention makes an attention mask of its own$"):
            FolderModule(tmp_path).reach()
