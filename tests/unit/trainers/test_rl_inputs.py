"""Flags that the inputs of a run show to be wrong, before any work; which runs keep their reference."""

import pytest

from megarl.trainers.rl_inputs import RLInputs, saves_reference
from tests.helpers.programs import program, rl_argv
from tests.helpers.texts.refusals import refusal

PIPELINE = "--rollout-pipeline-model-parallel-size 2 --role-map actor=0;critic=0;reward=0;reference=0;rollout=0-1"
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32"
WRONG = {  # ranks, flags, what is said
    "nothing to generate with": (1, "--debug-rollout-only", "--debug-rollout-only: needs weights to generate with"),
    "no sync": (1, "--verify-weights", "--verify-weights: the rollout shares the actor's weights"),
    "no routes": (1, "--router-replay old-logprob", "--router-replay old-logprob: the actor has no experts"),
    "routes of another model": (1, f"{EXPERTS} --router-replay rollout --router-replay-reference"
                                " --reference-num-experts 8",
                                "--router-replay-reference: the reference replays the actor's routes"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_flags(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    size, flags, says = WRONG[case]
    line = refusal(RLInputs, program("rl", rl_argv(tmp_path / "run", flags, warm_start=False), size))
    assert line.startswith(says)


@pytest.mark.parametrize("flags, is_saved", [
    ("", True), ("--kl-coefficient 0", False), ("--lora-rank 2", False),
    ("--lora-rank 2 --reference-update-interval 3", True),
])  # fmt: skip
def test_a_reference_beside_factors_is_saved_if_it_changes(flags, is_saved, tmp_path):
    config = program("rl", rl_argv(tmp_path, flags), 1)
    assert saves_reference(config.settings, config.roles) == is_saved
