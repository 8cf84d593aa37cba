"""Judges and reward models that a run cannot score with."""

from tests.helpers.envs.judges import judge_flags, write
from tests.helpers.folders import hf_folders
from tests.helpers.forked_programs import refusal
from tests.helpers.programs import inputs, rl_argv


def test_a_folder_of_a_reward_model_is_no_judge(tmp_path):
    folder, config = hf_folders.write_folder("llama_reward", tmp_path / "model"), write(tmp_path / "judge.yaml")
    policy = hf_folders.write_folder("qwen3", tmp_path / "policy")
    argv = (
        f"--hf-model {policy} --judge-hf-model {folder} --reward judge --judge-config {config} --advantage grpo"
        f" --prompts {inputs()}/train.jsonl --max-prompt-length 48 --max-response-length 8"
    ).split()
    shorter = [*argv, "--judge-max-length", "256"]
    assert f"--judge-hf-model {folder}: a model with a scalar head; a judge is a" in refusal(shorter)
    assert "--max-position-embeddings 256: allowed is --judge-max-length = 2048 or more" in refusal(argv)


def test_pairs_need_several_responses(tmp_path):
    messages = [{"role": "user", "content": "{first} {second}"}]
    config = write(tmp_path / "judge.yaml", mode="pair", messages=messages)
    for flags, start in (
        ("--samples-per-prompt 1 --minibatch-size 6", "--samples-per-prompt 1: "),
        ("--advantage remax --greedy-baseline", "--greedy-baseline: "),
    ):
        line = refusal(rl_argv(tmp_path / "run", judge_flags(config, flags)))
        assert f"{start}--judge-config {config} has the mode pair, which compares the responses to a prompt" in line
