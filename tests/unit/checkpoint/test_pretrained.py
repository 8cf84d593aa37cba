"""Checkpoints that hold another kind of model than a role starts from."""

from tests.helpers.forked_programs import refusal
from tests.helpers.programs import inputs, reward_model, rl_argv, sft_argv


def test_a_policy_checkpoint_is_not_a_reward_model(tmp_path):
    flags = f"--reward model --reward-model {inputs()}/sft"
    assert "holds a policy" in refusal(rl_argv(tmp_path / "run", flags))


def test_a_policy_does_not_start_from_a_reward_model(tmp_path):
    argv = sft_argv(tmp_path, f"--pretrained-checkpoint {reward_model()}")
    assert "holds a reward model" in refusal(argv, "sft")
