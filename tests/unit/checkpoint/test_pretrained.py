"""Checkpoints that hold another kind of model than a role starts from."""

import json

import pytest

from megarl.checkpoint import pretrained
from tests.helpers.forked_programs import refusal as refused
from tests.helpers.programs import inputs, program, reward_model, rl_argv, sft_argv
from tests.helpers.texts.refusals import refusal


def test_a_policy_checkpoint_is_not_a_reward_model(tmp_path):
    flags = f"--reward model --reward-model {inputs()}/sft"
    assert "holds a policy" in refused(rl_argv(tmp_path / "run", flags))


def test_a_policy_does_not_start_from_a_reward_model(tmp_path):
    argv = sft_argv(tmp_path, f"--pretrained-checkpoint {reward_model()}")
    assert "holds a reward model" in refused(argv, "sft")


# -- low-rank factors ----------------------------------------------------------------------------------------------


LORA = "--lora-rank 2 --lora-alpha 8"


def roles_of(folder, flags: str):
    roles = program("rl", rl_argv(folder, flags, warm_start=False), 1).roles
    return {name: roles[name] for name in ("actor", "critic")}


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    """A folder with the manifest of a run with factors; what else is in it is not read."""
    entry = pretrained.manifest_entry(roles_of(tmp_path, LORA))
    stored = json.loads(json.dumps(entry))
    monkeypatch.setattr(pretrained.folders, "read_manifest", lambda folder, flag: stored)
    monkeypatch.setattr(pretrained.folders, "find", lambda path, flag: path)
    return stored, tmp_path


def test_what_is_stored_comes_back(checkpoint, tmp_path):
    _, folder = checkpoint
    for name, role in roles_of(tmp_path, LORA).items():
        found = pretrained.stored_factors(folder, "--load", name)
        assert found == (role.lora, None, None, role.megatron.seed)
    assert pretrained.stored_factors(folder, "--load", "reward") is None
    assert pretrained.manifest_entry(roles_of(tmp_path, "")) == {}
    pretrained.check_factors(folder, list(roles_of(tmp_path, LORA).values()))


@pytest.mark.parametrize("flags, says", [
    ("--lora-rank 4 --lora-alpha 8", "the factors of the actor have --lora-rank 2; the flags give 4"),
    ("--lora-rank 2 --lora-alpha 4", "the factors of the actor have --lora-alpha 8.0; the flags give 4.0"),
    (f"{LORA} --critic-lora-targets q_proj", "the factors of the critic have --lora-targets"),
    ("", "has low-rank factors of the actor, whose flags give no --lora-rank"),
])  # fmt: skip
def test_other_factors_are_refused(flags, says, checkpoint, tmp_path):
    _, folder = checkpoint
    line = refusal(pretrained.check_factors, folder, list(roles_of(tmp_path, flags).values()))
    assert line.startswith(f"--load {folder}: {says}")


def test_flags_of_factors_need_a_checkpoint_with_some(checkpoint, tmp_path):
    stored, folder = checkpoint
    stored.clear()
    line = refusal(pretrained.check_factors, folder, list(roles_of(tmp_path, LORA).values()))
    assert line == f"--load {folder}: has no low-rank factors of the actor, whose flags give --lora-rank"


def test_a_damaged_entry_is_one_line(checkpoint):
    stored, folder = checkpoint
    del stored[pretrained.ENTRY]["actor"]["factors"]["--lora-rank"]
    line = refusal(pretrained.stored_factors, folder, "--load", "actor")
    assert line == f"--load {folder}: manifest.json is damaged (lora: KeyError('--lora-rank'))"
