"""tools/convert.py: folders to checkpoints and back, in different layouts, byte for byte."""

import filecmp
import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from tests.helpers.folders import hf_folders
from tests.helpers.folders.hf_damage import SECOND, config, in_order, index, tensors
from tests.helpers.tools import converted
from tests.helpers.worlds import run_world

ENORM = "model.layers.4.enorm.weight"


def run(size: int, *argv) -> list:
    return run_world(converted, size, *argv)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A folder of a model with experts, and the run folder made from it on one rank."""
    folder = tmp_path_factory.mktemp("convert")
    hf_folders.write_folder("glm4_moe_bf16", folder / "hf", files=2)
    assert run(1, "from-hf", "--hf-model", folder / "hf", "--save", folder / "run") == [0]
    return folder


def equal(one, other) -> bool:
    names = sorted(path.name for path in one.iterdir())
    same = filecmp.cmpfiles(one, other, names, shallow=False)[0]
    return sorted(same) == names == sorted(path.name for path in other.iterdir())


def test_a_folder_survives_a_checkpoint_and_other_layouts(checkpoint, tmp_path):
    folder, run_folder = checkpoint / "hf", checkpoint / "run"
    layout = "--expert-model-parallel-size", "2"
    assert run(2, "to-hf", "--hf-model", folder, "--load", run_folder, "--save", tmp_path / "back", *layout) == [0, 0]
    assert equal(folder, tmp_path / "back")


def test_verify_finds_one_changed_number(checkpoint, tmp_path, capfd):
    same = checkpoint / "hf"
    assert run(2, "verify", "--hf-model", same, "--load", checkpoint / "run", *"--pipeline-model-parallel-size 2"
               " --decoder-first-pipeline-num-layers 1".split()) == [0, 0]  # fmt: skip
    assert "all 137 tensors are equal" in capfd.readouterr().out
    shutil.copytree(same, tmp_path / "changed")
    file = tmp_path / "changed" / "model-00002-of-00002.safetensors"
    tensors = load_file(file)
    name = next(name for name in sorted(tensors) if "experts.3.down_proj" in name)
    tensors[name][0, 0] += 1
    save_file(tensors, file, metadata={"format": "pt"})
    assert run(1, "verify", "--hf-model", tmp_path / "changed", "--load", checkpoint / "run") == [1]
    assert f"1 of 137 tensors differ: {name} (by 1)" in capfd.readouterr().out


def test_a_folder_with_a_configuration_alone_gives_new_files(checkpoint, tmp_path):
    shutil.copytree(checkpoint / "hf", tmp_path / "empty", ignore=shutil.ignore_patterns("*.safetensors*"))
    argv = "to-hf", "--hf-model", tmp_path / "empty", "--load", checkpoint / "run", "--save", tmp_path / "out"
    assert run(1, *argv) == [0]
    expected = hf_folders.weights("glm4_moe_bf16")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and found[name].equal(tensor), name


def test_prediction_is_kept_or_dropped(checkpoint, tmp_path, capfd):
    """The same run, but for a folder that has more than the run."""
    source = shutil.copytree(checkpoint / "hf", tmp_path / "hf")
    add = in_order(config(num_nextn_predict_layers=1), tensors(add_norm, SECOND), index(with_norm))
    add(source)
    argv = "to-hf", "--hf-model", source, "--load", checkpoint / "run", "--save"
    assert run(1, *argv, tmp_path / "kept") == [0] and equal(source, tmp_path / "kept")
    assert "1 MTP tensors are those of the source folder, not trained" in capfd.readouterr().err
    assert run(1, *argv, tmp_path / "dropped", "--hf-mtp", "drop") == [0]
    assert not [name for name in load_file(tmp_path / "dropped" / SECOND) if name == ENORM]
    assert run(1, *argv[:2], checkpoint / "hf", *argv[3:], tmp_path / "none", "--hf-mtp", "drop") == [0]
    assert "has no tensors of multi-token prediction: --hf-mtp drop changes nothing" in capfd.readouterr().err


def add_norm(held):
    held[ENORM] = held["model.norm.weight"] + 1


def with_norm(files):
    return files | {ENORM: SECOND}


def test_a_reward_model_keeps_its_head(tmp_path):
    folder, run_folder = hf_folders.write_folder("qwen3_reward", tmp_path / "hf"), tmp_path / "run"
    assert run(1, "from-hf", "--reward", "--hf-model", folder, "--save", run_folder) == [0]
    argv = "to-hf", "--reward", "--hf-model", folder, "--load", run_folder, "--save", tmp_path / "back"
    assert run(2, *argv, "--tensor-model-parallel-size", "2") == [0, 0]
    assert equal(folder, tmp_path / "back")


def test_a_language_model_becomes_a_critic_with_a_scalar_head(tmp_path):
    folder = hf_folders.write_folder("llama3", tmp_path / "hf")
    assert run(1, "from-hf", "--critic", "--hf-model", folder, "--save", tmp_path / "run") == [0]
    argv = "to-hf", "--critic", "--hf-model", folder, "--load", tmp_path / "run", "--save", tmp_path / "out"
    assert run(1, *argv) == [0]
    found, stored = load_file(tmp_path / "out" / "model.safetensors"), hf_folders.weights("llama3")
    assert found.keys() == stored.keys() - {"lm_head.weight"} | {"score.weight"}
    assert found.pop("score.weight").shape == (1, 64)
    assert all(tensor.equal(stored[name]) for name, tensor in found.items())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"] and config["num_labels"] == 1


WRONG = {
    "no command": ([], "convert: nothing: allowed is from-hf, to-hf, verify, average"),
    "no folder": (["from-hf", "--save", "x"], "is missing"),
    "no run": (["to-hf", "--hf-model", "HF", "--save", "x"], "--load is missing"),
    "no place": (["from-hf", "--hf-model", "HF"], "--save is missing"),
    "no place of an export": (["to-hf", "--hf-model", "HF", "--load", "RUN"], "--save is missing"),
    "onto itself": (["to-hf", "--hf-model", "HF", "--load", "RUN", "--save", "HF"], "is the folder of --hf-model"),
    "a policy as a reward model": (["verify", "--reward", "--hf-model", "HF", "--load", "RUN"], "has no reward."),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_gives_one_line(case, checkpoint, capfd):
    argv, expected = WRONG[case]
    places = {"HF": checkpoint / "hf", "RUN": checkpoint / "run"}
    assert run(1, *[places.get(word, word) for word in argv]) == [2]
    (line,) = capfd.readouterr().err.strip().splitlines()
    assert expected in line
