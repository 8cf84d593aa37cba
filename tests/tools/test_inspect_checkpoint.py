"""tools/inspect_checkpoint.py on real checkpoints of two layouts, Hugging Face folders, adapters and damaged files."""

import json
import pickle
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.checkpoint import manifest as manifests
from tests.helpers.checkpoints import Attack
from tests.helpers.folders import hf_folders
from tests.helpers.programs import sft_argv, train
from tools import inspect_checkpoint, record_runs
from tools._tensor_sources import CheckpointTensors

LAYERS = "--num-layers 3 --train-iters 2 --lr-warmup-iters 1 --save-interval 1"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of two tensor-parallel ranks with checkpoints of steps 1 and 2."""
    folder = tmp_path_factory.mktemp("inspect") / "run"
    train("sft", sft_argv(folder, f"{LAYERS} --tensor-model-parallel-size 2"), 2)
    return folder


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """The same training on one rank."""
    folder = tmp_path_factory.mktemp("inspect") / "other"
    train("sft", sft_argv(folder, LAYERS))
    return folder


def inspect(capsys, *argv) -> tuple[int, str]:
    status = inspect_checkpoint.main([str(word) for word in argv])
    printed = capsys.readouterr()
    assert status != 2 and not printed.err, printed.err
    return status, printed.out


def as_json(capsys, *argv) -> tuple[int, dict]:
    status, out = inspect(capsys, *argv, "--json")
    return status, json.loads(out)


@pytest.fixture
def error(refusal):
    return lambda *argv: refusal(inspect_checkpoint.main, [str(word) for word in argv])


def step(run, number: int):
    return run / "checkpoints" / f"step_{number:08d}"


def test_a_run_folder_shows_its_latest_checkpoint(run, capsys):
    status, found = as_json(capsys, run, "--verify")
    manifest = manifests.read(step(run, 2), "")
    assert status == 0 and found["problems"] == [] and found["folder"] == str(step(run, 2))
    assert (found["step"], found["program"], found["world_size"], found["named_by"]) == (2, "train_sft", 2, ["latest"])
    assert found["data"] == manifest["data"] and found["prompt_order"] == manifest["prompt_order"]
    assert found["layout"]["actor"]["tensor"] == 2
    assert found["files"]["bytes"] == sum(path.stat().st_size for path in step(run, 2).iterdir()) - (
        step(run, 2) / "manifest.json").stat().st_size  # fmt: skip
    role = found["roles"]["actor"]
    fc1 = next(group for group in role["groups"] if "fc1.weight" in group["name"])
    assert fc1 == {"name": "decoder.layers.{0-2}.mlp.linear_fc1.weight", "tensors": 3, "dtype": "float32",
                   "shape": [128, 32], "elements": 3 * 128 * 32}  # fmt: skip
    assert role["weights"]["elements"] == sum(group["elements"] for group in role["groups"])
    assert role["optimizer"]["elements"] == 2 * role["weights"]["elements"]  # Adam's two moments


def test_every_tensor_is_read_as_torch_reads_the_whole_checkpoint(run):
    source, whole = CheckpointTensors(step(run, 2), ""), dict(record_runs._leaves(record_runs._state_of(step(run, 2))))
    tensors = {key: value for key, value in whole.items() if torch.is_tensor(value)}
    assert {part.key for part in source.parts.values()} == tensors.keys()
    stacked = 0
    for name, part in source.parts.items():
        expected = tensors[part.key] if part.layer is None else tensors[part.key][part.layer]
        assert torch.equal(source.read(name), expected) and part.shape == tuple(expected.shape)
        stacked += part.layer is not None
    assert stacked and source.parts["actor.decoder.layers.2.mlp.linear_fc1.weight"].layer == 2


def test_text_names_everything_once(run, capsys):
    _, out = inspect(capsys, step(run, 1))
    lines = [line.split() for line in out.splitlines()]
    assert lines[1][:4] == ["program", "train_sft,", "step", "1,"]
    assert ["layout", "of", "actor", "ranks", "0-1,", "tensor", "2"] in lines
    assert ["decoder.layers.{0-2}.mlp.linear_fc1.weight", "3", "×", "float32", "[128,", "32]", "12,288"] in lines
    assert next(line for line in lines if line[:1] == ["actor"])[-4:] == ["KiB", "in", "40", "tensors"]


def test_two_layouts_differ_by_rounding_and_two_steps_by_more(run, other, capsys):
    status, found = as_json(capsys, run, "--diff", run)
    assert status == 0 and all(row["equal"] == row["tensors"] for row in found["diff"]["groups"])
    _, found = as_json(capsys, step(run, 1), "--diff", step(other, 1))
    weights = [row for row in found["diff"]["groups"] if "optimizer" not in row["name"]]
    assert found["diff"]["only_here"] == found["diff"]["only_there"] == [] and len(weights) > 5
    assert max(row["max_abs"] for row in weights) < 1e-4
    status, out = inspect(capsys, step(run, 1), "--diff", step(run, 2))
    row = next(
        line.split() for line in out.splitlines() if line.startswith("actor.decoder.layers.{0-2}.mlp.linear_fc2")
    )
    assert status == 1 and row[1:4] == ["0", "of", "3"] and float(row[4]) > 1e-4 and float(row[5]) > 1e-4


def changed(folder, target, edit):
    """A copy of a checkpoint with edited files, and a manifest that fits them if `edit` says so."""
    shutil.copytree(folder, target)
    if edit(target):
        entries = manifests.read(target, "")
        entries["files"] = {name: manifests.seal(target / name) for name in entries["files"]}
        manifests.write(target, entries)
    return target


def flip(target):
    """Flips a bit of a number in the largest data file."""
    path = max(target.glob("*.distcp"), key=lambda file: file.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 64
    path.write_bytes(data)


def test_verify_finds_one_flipped_bit(run, tmp_path, capsys):
    damaged = changed(step(run, 2), tmp_path / "damaged", flip)
    assert inspect(capsys, damaged)[0] == 0  # nothing is read without --verify
    status, out = inspect(capsys, damaged, "--verify")
    assert status == 1
    assert re.search(
        r"^damaged: damaged: __\d_0.distcp is damaged \(its content does not have its checksum\)$", out, re.MULTILINE
    )


def test_verify_finds_weights_that_are_not_finite(tmp_path, capsys):
    folder = hf_folders.write_folder("llama3", tmp_path / "hf")
    assert inspect(capsys, folder, "--verify")[0] == 0
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    status, found = as_json(capsys, folder, "--verify")
    assert status == 1 and found["problems"] == ["model.norm.weight: holds numbers that are not finite"]


def test_a_hugging_face_folder_of_several_files(tmp_path, capsys):
    folder = hf_folders.write_folder("glm4_moe_bf16", tmp_path / "hf", files=2)
    _, found = as_json(capsys, folder)
    stored = hf_folders.weights("glm4_moe_bf16")
    assert found["kind"] == "Hugging Face folder" and found["roles"].keys() == {"weights"}
    role = found["roles"]["weights"]
    assert role["weights"]["tensors"] == len(stored)
    assert role["weights"]["bytes"] == sum(tensor.nbytes for tensor in stored.values())
    assert any(re.fullmatch(r"model\.layers\.\S+\.mlp\.experts\.\{0-\d\}\.down_proj\.weight", group["name"])
               for group in role["groups"])  # fmt: skip
    shutil.copytree(folder, tmp_path / "copy")
    assert as_json(capsys, folder, "--diff", tmp_path / "copy")[0] == 0
    one = min((tmp_path / "copy").glob("*.safetensors"))
    tensors = load_file(one)
    name = min(tensors)
    tensors[name].view(torch.uint8).flatten()[0] ^= 1
    save_file(tensors, one, metadata={"format": "pt"})
    status, found = as_json(capsys, folder, "--diff", tmp_path / "copy")
    assert status == 1 and sum(row["tensors"] - row["equal"] for row in found["diff"]["groups"]) == 1


def adapter(folder, rank=4):
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": 8}))
    names = [f"base_model.model.model.layers.{i}.self_attn.q_proj.lora_{side}.weight" for i in (0, 1) for side in "AB"]
    shapes = {"A": (rank, 8), "B": (16, rank)}
    tensors = {name: torch.ones(shapes[name.split("lora_")[1][0]]) for name in names}
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def test_a_peft_adapter(tmp_path, capsys):
    folder = adapter(tmp_path / "adapter")
    _, found = as_json(capsys, folder)
    assert found["kind"] == "PEFT adapter"
    assert [(group["name"], group["shape"]) for group in found["roles"]["weights"]["groups"]] == [
        ("base_model.model.model.layers.{0-1}.self_attn.q_proj.lora_A.weight", [4, 8]),
        ("base_model.model.model.layers.{0-1}.self_attn.q_proj.lora_B.weight", [16, 4]),
    ]
    status, found = as_json(capsys, folder, "--diff", adapter(tmp_path / "smaller", 2))
    assert status == 1 and len(found["diff"]["other_shape"]) == 4 and found["diff"]["groups"] == []


def test_a_file_that_would_run_code_is_refused_in_one_line(run, tmp_path, error):
    mark = tmp_path / "mark"

    def attack(target):
        (target / ".metadata").write_bytes(pickle.dumps(Attack(mark)))
        return True

    line = error(changed(step(run, 2), tmp_path / "hostile", attack))
    assert "names pathlib" in line and not mark.exists()


def truncate(target):
    file = target / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-10])


def cut_data(target):
    """Data that the metadata names are gone, and the manifest fits."""
    file = max(target.glob("*.distcp"), key=lambda file: file.stat().st_size)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    return True


def test_damage_gives_one_line(run, tmp_path, error):
    assert "__0_0.distcp has" in error(changed(step(run, 2), tmp_path / "truncated", truncate))
    assert "cannot be read" in error(changed(step(run, 2), tmp_path / "cut", cut_data), "--verify")
    name = "manifest.json"
    no_json = changed(step(run, 2), tmp_path / "manifest", lambda target: (target / name).write_text("{") * 0)
    assert "manifest.json is damaged" in error(no_json)
    folder = hf_folders.write_folder("llama3", tmp_path / "hf")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert "is no readable safetensors file" in error(folder)
    (adapter(tmp_path / "adapter") / "adapter_model.safetensors").unlink()
    assert "adapter_model.safetensors is missing" in error(tmp_path / "adapter")


def test_wrong_input_gives_one_line(run, tmp_path, error):
    assert "nowhere: no such folder; allowed is a run's folder" in error(tmp_path / "nowhere")
    assert "holds no complete checkpoint" in error(tmp_path)
    folder = hf_folders.write_folder("llama3", tmp_path / "hf")
    line = error(run, "--diff", folder)
    assert "--diff" in line and "tools/convert.py verify compares" in line
    assert "--diff" in error(run, "--diff", tmp_path / "nowhere")
