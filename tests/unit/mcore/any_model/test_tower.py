"""A folder's vision tower: rows as transformers' own, one image at a time."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.errors import UsageError
from megarl.mcore.any_model.tower import FAMILIES, Tower
from megarl.mcore.weights.hf.folder import HFFolder
from tests.helpers.folders import vision_folders
from tests.helpers.folders.vision_folders import KINDS
from tests.helpers.tiers import by_default
from tests.helpers.worlds import on_each_rank, run_world


@pytest.fixture(autouse=True, scope="module")
def _made():
    """The folder, before ranks are forked."""
    vision_folders.folder_of("qwen3_vl")


def copied(tmp_path, kind: str = "qwen3_vl"):
    return shutil.copytree(vision_folders.folder_of(kind).path, tmp_path / kind)


def own_and_theirs(rank: int, kind: str, folder: vision_folders.VisionFolder):
    model, tower = vision_folders.module_of(kind), Tower(HFFolder(folder.path))
    for pixels in folder.images.values():
        given = vision_folders.inputs_of(kind, ["A"], {"A": pixels})
        given = {name: given[name] for name in ("pixel_values", "image_grid_thw", "image_sizes") if name in given}
        with torch.no_grad():
            found = model.model.get_image_features(**given, return_dict=True)
        image = tower.compute(pixels)
        assert torch.equal(image.embeddings, torch.cat(list(found.pooler_output)))
        features = [each[0] for each in getattr(found, "deepstack_features", ())]
        assert len(image.features) == tower.layers == (2 if kind.startswith("qwen3_vl") else 0) == len(features)
        assert all(map(torch.equal, image.features, features))
        merge = round((pixels.grid[1] * pixels.grid[2] / pixels.tokens) ** 0.5)
        assert image.size == (1, pixels.grid[1] // merge, pixels.grid[2] // merge)


@pytest.mark.parametrize("kind", by_default(KINDS, ["qwen3_vl"]))
def test_rows_are_those_of_transformers(kind):
    assert KINDS.keys() - {"llava_pixtral"} == FAMILIES.keys()
    run_world(own_and_theirs, 1, kind, vision_folders.folder_of(kind))


@on_each_rank()
def test_the_digest_names_the_weights(rank, tmp_path):
    folder, used = copied(tmp_path), Tower(HFFolder(vision_folders.folder_of("qwen3_vl").path))
    before = Tower(HFFolder(folder)).digest
    used.compute(vision_folders.folder_of("qwen3_vl").images["A"])
    assert used.digest == before
    assert before == Tower(HFFolder(vision_folders.folder_of("qwen3_vl").path)).digest and len(before) == 64
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] += 1  # of the language model
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert Tower(HFFolder(folder)).digest == before
    tensors["model.visual.merger.norm.bias"][0] += 1
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert Tower(HFFolder(folder)).digest != before


@on_each_rank()
def test_the_language_model_has_no_memory(rank):
    tower = Tower(HFFolder(vision_folders.folder_of("qwen3_vl").path))
    names = [name for name, _ in tower._module.named_parameters()]
    assert names and all(name.startswith("model.visual.") for name in names)
    assert not any(parameter.requires_grad for parameter in tower._module.parameters())


@on_each_rank()
def test_an_image_with_other_rows_than_ids_is_an_error(rank):
    folder = vision_folders.folder_of("qwen3_vl")
    pixels = folder.images["A"]
    with pytest.raises(ValueError, match="an image of 5 tokens became 4 rows"):
        Tower(HFFolder(folder.path)).compute(type(pixels)(pixels.values, pixels.grid, 5, pixels.key, pixels.digest))


def write_config(folder, change):
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def of_llama(config):
    config["model_type"] = "llama"


def other_sections(config):
    config["text_config"]["rope_parameters"]["mrope_section"] = [6, 5, 4]


def of_class_row(config):
    config["vision_feature_select_strategy"] = "default"
    config["model_type"], config["vision_config"] = "llava", {"model_type": "siglip_vision_model"}


def text_in_config(config):
    config["vision_config"] = "x"


@pytest.mark.parametrize(
    "change, needle",
    [
        (of_llama, "model_type 'llama': images need a vision tower of qwen2_vl, "),
        (other_sections, "mrope_section [6, 5, 4]: allowed are three numbers whose sum is 16"),
        (
            of_class_row,
            "vision_feature_select_strategy 'default' of siglip_vision_model: a row is no patch of an image",
        ),
        (text_in_config, "config.json: transformers refuses it"),
    ],
)
@on_each_rank()
def test_folders_that_cannot_have_images(rank, change, needle, tmp_path):
    folder = copied(tmp_path)
    write_config(folder, change)
    with pytest.raises(UsageError) as caught:
        Tower(HFFolder(folder)).store(torch.float32)
    assert needle in str(caught.value) and "\n" not in str(caught.value)


@on_each_rank()
def test_who_reads_no_rows_with_three_positions(rank):
    tower = Tower(HFFolder(vision_folders.folder_of("qwen3_vl").path))
    tower.check_reader(False)
    with pytest.raises(UsageError, match="--model-source transformers does not go with images whose rows have three"):
        tower.check_reader(True)


@pytest.mark.parametrize("problem", ["is missing", "the shape [3]; config.json describes"])
@on_each_rank()
def test_tensors_that_do_not_fit(rank, problem, tmp_path):
    folder = copied(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    name = "model.visual.merger.norm.bias"
    tensors.pop(name) if "missing" in problem else tensors.update({name: torch.zeros(3)})
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UsageError, match=f"{name} ") as caught:
        Tower(HFFolder(folder)).compute(vision_folders.folder_of("qwen3_vl").images["A"])
    assert problem in str(caught.value)
