"""Which tensors belong to multi-token prediction: by the number of a layer, or by a prefix of their own."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megarl.mcore.weights.hf.family import NO_PREDICTION, PREDICTION_LAYERS, PREDICTION_MODULE
from megarl.mcore.weights.hf.tensor_names import PredictionTensors
from tests.helpers.folders import hf_folders
from tests.helpers.folders.hf_damage import CONFIG, SINGLE, in_order, tensors
from tests.helpers.folders.hf_layouts import build
from tests.helpers.folders.hf_prediction import EMBEDDING, HEAD, prediction_tensors, with_prediction
from tests.helpers.tiers import by_default
from tests.helpers.worlds import run_world


def test_layers_after_those_of_the_model():
    found = PredictionTensors(PREDICTION_LAYERS, range(61, 62), is_kept=True)
    assert found.has("model.layers.61.eh_proj.weight") and found.has("model.layers.61.mlp.experts.7.up_proj.weight")
    assert not any(map(found.has, ("model.layers.60.enorm.weight", "model.layers.62.enorm.weight", "model.layers.61")))
    assert found.copied("model.layers.61.embed_tokens.weight") == "model.embed_tokens.weight"
    assert found.copied("model.layers.61.shared_head.head.weight") == "lm_head.weight"
    assert found.copied("model.layers.61.shared_head.norm.weight") is None
    assert found.copied("model.layers.60.embed_tokens.weight") is None
    assert found.without({"num_nextn_predict_layers": 1, "a": 2}) == {"num_nextn_predict_layers": 0, "a": 2}
    assert found.without({}) == {"num_nextn_predict_layers": 0}


def test_a_prefix_of_their_own():
    found = PredictionTensors(PREDICTION_MODULE, range(4, 4), is_kept=False)
    assert found.has("mtp.fc.weight") and found.has("mtp.layers.0.mlp.gate.weight")
    assert not found.has("model.layers.4.mtp.weight") and found.copied("mtp.fc.weight") is None
    assert found.note(["mtp.fc.weight", "lm_head.weight"]) is not None


def test_families_without_any():
    found = PredictionTensors(NO_PREDICTION, range(3, 3), is_kept=True)
    assert not found.has("model.layers.3.eh_proj.weight") and found.note(["model.layers.3.eh_proj.weight"]) is None


SHARED = {"embed_tokens.weight": EMBEDDING, "shared_head.head.weight": HEAD}
LAYOUTS = {
    "one rank": (1, ""),
    "pp2": (2, "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1"),
    "tp2": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
}


def export_changed(rank: int, source: Path, folder: Path, flags: str):
    """Exports the model after a change of all its weights."""
    from megarl.mcore.weights.hf.folder_weights import export_weights

    _, groups, model, weights = build(source, flags, False)
    with torch.no_grad():
        for parameter in (each for chunk in model for each in chunk.parameters()):
            parameter.mul_(2)
    export_weights(weights.weight_map, model, groups.pg_collection, folder)


def own_embedding(held):
    """An embedding that the prediction layer does not share."""
    held["model.layers.3.embed_tokens.weight"][5, 5] += 1


@pytest.mark.parametrize("layout", by_default(LAYOUTS, ["pp2"]))
def test_copies_are_those_of_the_trained_weights(layout, tmp_path):
    source, (size, flags) = hf_folders.write_folder("deepseek_v3", tmp_path / "hf"), LAYOUTS[layout]
    with_prediction(source)
    run_world(export_changed, size, source, tmp_path / "out", flags)
    before, after = prediction_tensors(source), load_file(tmp_path / "out" / SINGLE)
    for name, tensor in before.items():
        of = SHARED.get(name.removeprefix("model.layers.3."))
        assert after[name].equal(tensor if of is None else after[of]), name
    assert after[EMBEDDING].equal(2 * load_file(source / SINGLE)[EMBEDDING])
    assert (source / CONFIG).read_bytes() == (tmp_path / "out" / CONFIG).read_bytes()


@pytest.mark.long
def test_what_is_no_copy_stays_as_it_is(tmp_path):
    source = hf_folders.write_folder("deepseek_v3", tmp_path / "hf")
    in_order(with_prediction, tensors(own_embedding))(source)
    run_world(export_changed, 1, source, tmp_path / "out", "")
    before, after = prediction_tensors(source), load_file(tmp_path / "out" / SINGLE)
    changed = [name for name, tensor in before.items() if not after[name].equal(tensor)]
    assert changed == ["model.layers.3.shared_head.head.weight"]


@pytest.mark.long
@pytest.mark.parametrize("case, layer", [("glm4_moe", 4), ("deepseek_v3", 3)])
def test_dropped_tensors(case, layer, tmp_path):
    source = hf_folders.write_folder(case, tmp_path / "hf")
    with_prediction(source)
    run_world(export_changed, 1, source, tmp_path / "out", "--export-hf --save x --hf-mtp drop")
    before, after = load_file(source / SINGLE), load_file(tmp_path / "out" / SINGLE)
    assert after.keys() == {name for name in before if not name.startswith(f"model.layers.{layer}.")}
    config = json.loads((tmp_path / "out" / CONFIG).read_text())
    assert config == json.loads((source / CONFIG).read_text()) | {"num_nextn_predict_layers": 0}


@pytest.mark.long
def test_a_critic_has_none(tmp_path):
    """Its head is not the one that prediction shares."""
    source = hf_folders.write_folder("deepseek_v3", tmp_path / "hf")
    with_prediction(source)
    run_world(export_critic, 1, source, tmp_path / "out")
    after = load_file(tmp_path / "out" / SINGLE)
    assert not [name for name in after if name.startswith("model.layers.3.")] and "score.weight" in after
    assert json.loads((tmp_path / "out" / CONFIG).read_text())["num_nextn_predict_layers"] == 0


def export_critic(rank: int, source: Path, folder: Path):
    from megarl.mcore.weights.hf.folder_weights import export_weights

    _, groups, model, weights = build(source, "", True)
    export_weights(weights.weight_map, model, groups.pg_collection, folder)
