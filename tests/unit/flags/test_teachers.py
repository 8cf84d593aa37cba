"""Folders of `--teachers`: what each says about its model, and folders that are one model."""

from types import SimpleNamespace

import pytest
import yaml

from megarl.errors import UsageError
from megarl.flags import teachers
from tests.helpers.texts.refusals import refusal


def run_folder(path, **settings):
    """A run folder of megarl with these settings."""
    path.mkdir()
    (path / "settings.yaml").write_text(yaml.safe_dump(settings))
    return path


def hf_folder(path):
    path.mkdir()
    (path / "config.json").write_text("{}")
    return path


def test_a_folder_says_what_describes_its_model(tmp_path):
    hf = hf_folder(tmp_path / "hf")
    assert teachers.read_folder(str(hf)) == (str(hf), {}, None, None)
    described = {"num_layers": 3, "window_size": [4, 0], "max_position_embeddings": 9, "lr": 1.0}
    actor = {"actor": {"megatron": described | {"multi_latent_attention": True, "kv_channels": 5}}}
    run = run_folder(tmp_path / "run", megarl={"hf_model": None}, roles=actor)
    shape = {"num_layers": 3, "window_size": (4, 0), "multi_latent_attention": True, "kv_channels": None}
    step = run / "checkpoints" / "step_00000001"
    step.mkdir(parents=True)
    for path in (run, step):
        assert teachers.read_folder(str(path)) == (None, shape, str(path), "megatron")
    of_hf = run_folder(tmp_path / "of_hf", megarl={"hf_model": "x"}, roles=actor)
    assert teachers.read_folder(str(of_hf)) == ("x", {}, str(of_hf), "megatron")


def test_other_folders_are_refused(tmp_path):
    line = refusal(teachers.read_folder, str(tmp_path))
    assert line.startswith(f"--teachers {tmp_path}: allowed is a Hugging Face folder (with config.json), a run folder")
    run_folder(tmp_path / "run", megarl={}, roles={})
    line = refusal(teachers.read_folder, str(tmp_path / "run"))
    assert line == f"--teachers {tmp_path}/run/settings.yaml: describes no policy (roles: actor: megatron)"


def test_folders_that_are_the_same_are_one_model(tmp_path):
    one, two = hf_folder(tmp_path / "one"), hf_folder(tmp_path / "two")
    built = []

    def build(folder, sharded: bool = False):
        built.append(folder.hf_model)
        return SimpleNamespace(megatron=SimpleNamespace(use_torch_fsdp2=sharded))

    text = f"a={one} b={two} c={one}/../one"
    found = teachers.teacher_models(text, build)
    assert (found.names, found.model_of, found.take_turns) == (("a", "b", "c"), (0, 1, 0), True)
    assert built == [str(one), str(two)]
    assert not teachers.teacher_models(f"a={one} c={one}", build).take_turns
    line = refusal(teachers.teacher_models, text, lambda folder: build(folder, True))
    assert line.startswith(f"--teachers {text}: not allowed with --use-torch-fsdp2: teachers take turns")


def test_an_error_names_the_teacher(tmp_path):
    def build(folder):
        raise UsageError("--num-layers 0: allowed is 1 or more")

    line = refusal(teachers.teacher_models, f"a={hf_folder(tmp_path / 'one')}", build)
    assert line == f"--num-layers 0: allowed is 1 or more (--teachers a={tmp_path}/one)"


@pytest.mark.parametrize("option", ["--teacher-hf-model", "--teacher-num-layers", "--teacher-pretrained-checkpoint"])
def test_flags_that_say_what_the_folders_say_are_refused(option):
    megatron = {"--num-layers": "num_layers", "--pretrained-checkpoint": "pretrained_checkpoint", "--bf16": "bf16"}
    teachers.check_flags("a=x", ["--teacher-bf16", "--num-layers"], megatron)
    teachers.check_flags(None, [option], megatron)
    line = refusal(teachers.check_flags, "a=x", ["--teacher-bf16", option], megatron)
    assert line == f"{option}: not allowed with --teachers, whose folders give models and weights; leave it out"
