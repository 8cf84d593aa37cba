"""Low-rank factors of a checkpoint: what its manifest says, and flags that describe others."""

import json

import pytest

from megarl.checkpoint import factors
from tests.helpers.programs import program, rl_argv
from tests.helpers.texts.refusals import refusal

LORA = "--lora-rank 2 --lora-alpha 8"


def roles_of(folder, flags: str):
    roles = program("rl", rl_argv(folder, flags, warm_start=False), 1).roles
    return {name: roles[name] for name in ("actor", "critic")}


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    """A folder with the manifest of a run with factors; what else is in it is not read."""
    entry = factors.manifest_entry(roles_of(tmp_path, LORA))
    stored = json.loads(json.dumps(entry))
    monkeypatch.setattr(factors.folders, "read_manifest", lambda folder, flag: stored)
    monkeypatch.setattr(factors.folders, "find", lambda path, flag: path)
    return stored, tmp_path


def test_what_is_stored_comes_back(checkpoint, tmp_path):
    _, folder = checkpoint
    for name, role in roles_of(tmp_path, LORA).items():
        found = factors.stored_factors(folder, "--load", name)
        assert found.lora == role.lora and found.base == (None, None, role.megatron.seed)
    assert factors.stored_factors(folder, "--load", "reward") is None
    assert factors.manifest_entry(roles_of(tmp_path, "")) == {}
    factors.check_factors(folder, list(roles_of(tmp_path, LORA).values()))


@pytest.mark.parametrize("flags, says", [
    ("--lora-rank 4 --lora-alpha 8", "the factors of the actor have --lora-rank 2; the flags give 4"),
    ("--lora-rank 2 --lora-alpha 4", "the factors of the actor have --lora-alpha 8.0; the flags give 4.0"),
    (f"{LORA} --critic-lora-targets q_proj", "the factors of the critic have --lora-targets"),
    ("", "has low-rank factors of the actor, whose flags give no --lora-rank"),
])  # fmt: skip
def test_other_factors_are_refused(flags, says, checkpoint, tmp_path):
    _, folder = checkpoint
    line = refusal(factors.check_factors, folder, list(roles_of(tmp_path, flags).values()))
    assert line.startswith(f"--load {folder}: {says}")


def test_flags_of_factors_need_a_checkpoint_with_some(checkpoint, tmp_path):
    stored, folder = checkpoint
    stored.clear()
    line = refusal(factors.check_factors, folder, list(roles_of(tmp_path, LORA).values()))
    assert line == f"--load {folder}: has no low-rank factors of the actor, whose flags give --lora-rank"


def test_a_damaged_entry_is_one_line(checkpoint):
    stored, folder = checkpoint
    del stored[factors.ENTRY]["actor"]["factors"]["--lora-rank"]
    line = refusal(factors.stored_factors, folder, "--load", "actor")
    assert line == f"--load {folder}: manifest.json is damaged (lora: KeyError('--lora-rank'))"
