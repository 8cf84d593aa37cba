"""Flags of distillation: combinations that are refused, and the folders of `--teachers`."""

from types import SimpleNamespace

import pytest
import yaml

from megarl.errors import UsageError
from megarl.flags import distillation
from tests.helpers.flag_rules import check_rules
from tests.helpers.pages.flag_cases import CONTEXT
from tests.helpers.texts.refusals import refusal

WRONG = {
    "advantages of examples": ("--distill reward --teacher-hf-model x", "--distill reward: adds to advantages", "sft"),
    "an average of examples": ("--distill loss --teacher ema", "--teacher ema: only in train_rl", "sft"),
    "an average of nothing": ("--distill loss --teacher ema", "--teacher ema: needs --ema-decay"),
    "an average ahead of itself": ("--distill loss --teacher ema --ema-decay 0.9 --generation-lag 1"
                                   " --rollout-correction tis", "--teacher ema: needs --generation-lag 0"),
    "folders of a start": ("--distill loss --teacher self --teachers a=b", "--teachers a=b: names the teachers' folde"),
    "a response alone": (CONTEXT.replace("grpo --samples-per-prompt 4", "reinforce++ --samples-per-prompt 1"),
                         "--teacher-context sibling: needs --samples-per-prompt 2 or more"),
    "siblings without rewards": (CONTEXT.replace("--reward exact-match --advantage grpo", ""),
                                 "--teacher-context sibling: needs a --reward that says which responses are correct"),
    "no room for a sibling": (CONTEXT.replace("9000", "512"), "--teacher-context sibling: needs --teacher-max-prompt"),
    "siblings of an environment": (f"{CONTEXT.replace('exact-match', 'environment')} --environment x:y",
                                   "--teacher-context sibling: not allowed with --environment"),
}  # fmt: skip


def test_each_rule_refuses_a_case_in_its_words():
    check_rules([distillation], WRONG)


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
    assert distillation.read_folder(str(hf)) == (str(hf), {}, None, None)
    described = {"num_layers": 3, "window_size": [4, 0], "max_position_embeddings": 9, "lr": 1.0}
    actor = {"actor": {"megatron": described | {"multi_latent_attention": True, "kv_channels": 5}}}
    run = run_folder(tmp_path / "run", megarl={"hf_model": None}, roles=actor)
    shape = {"num_layers": 3, "window_size": (4, 0), "multi_latent_attention": True, "kv_channels": None}
    step = run / "checkpoints" / "step_00000001"
    step.mkdir(parents=True)
    for path in (run, step):
        assert distillation.read_folder(str(path)) == (None, shape, str(path), "megatron")
    of_hf = run_folder(tmp_path / "of_hf", megarl={"hf_model": "x"}, roles=actor)
    assert distillation.read_folder(str(of_hf)) == ("x", {}, str(of_hf), "megatron")


def test_other_folders_are_refused(tmp_path):
    line = refusal(distillation.read_folder, str(tmp_path))
    assert line.startswith(f"--teachers {tmp_path}: allowed is a Hugging Face folder (with config.json), a run folder")
    run_folder(tmp_path / "run", megarl={}, roles={})
    line = refusal(distillation.read_folder, str(tmp_path / "run"))
    assert line == f"--teachers {tmp_path}/run/settings.yaml: describes no policy (roles: actor: megatron)"


def test_folders_that_are_the_same_are_one_model(tmp_path):
    one, two = hf_folder(tmp_path / "one"), hf_folder(tmp_path / "two")
    built = []

    def build(folder, sharded: bool = False):
        built.append(folder.hf_model)
        return SimpleNamespace(megatron=SimpleNamespace(use_torch_fsdp2=sharded))

    text = f"a={one} b={two} c={one}/../one"
    found = distillation.teacher_models(text, build)
    assert (found.names, found.model_of, found.take_turns) == (("a", "b", "c"), (0, 1, 0), True)
    assert built == [str(one), str(two)]
    assert not distillation.teacher_models(f"a={one} c={one}", build).take_turns
    line = refusal(distillation.teacher_models, text, lambda folder: build(folder, True))
    assert line.startswith(f"--teachers {text}: not allowed with --use-torch-fsdp2: teachers take turns")


def test_an_error_names_the_teacher(tmp_path):
    def build(folder):
        raise UsageError("--num-layers 0: allowed is 1 or more")

    line = refusal(distillation.teacher_models, f"a={hf_folder(tmp_path / 'one')}", build)
    assert line == f"--num-layers 0: allowed is 1 or more (--teachers a={tmp_path}/one)"


@pytest.mark.parametrize("option", ["--teacher-hf-model", "--teacher-num-layers", "--teacher-pretrained-checkpoint"])
def test_flags_that_say_what_the_folders_say_are_refused(option):
    megatron = {"--num-layers": "num_layers", "--pretrained-checkpoint": "pretrained_checkpoint", "--bf16": "bf16"}
    distillation.check_teacher_flags("a=x", ["--teacher-bf16", "--num-layers"], megatron)
    distillation.check_teacher_flags(None, [option], megatron)
    line = refusal(distillation.check_teacher_flags, "a=x", ["--teacher-bf16", option], megatron)
    assert line == f"{option}: not allowed with --teachers, whose folders give models and weights; leave it out"
