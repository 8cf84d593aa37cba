"""launch/rlhf_pipeline.sh: files passed from stage to stage, valid commands, wrong use."""

import itertools
import json
import re
import shutil
from pathlib import Path

import pytest
import yaml

from megarl import arguments
from tests.helpers.launch_scripts import launch
from tests.helpers.programs import ROOT
from tests.helpers.tools import load_tool

PROGRAMS = {"train_sft": "sft", "train_reward": "reward", "train_rl": "rl", "evaluate": "evaluate"}
STUB = """#!/usr/bin/env python3
import json, os, sys
print("called " + json.dumps([os.environ.get("NPROC", ""), *sys.argv[1:]]), flush=True)
"""


def checkout(folder: Path) -> Path:
    """A checkout of the pipeline whose programs and tools only say how they were called."""
    shutil.copytree(ROOT / "launch", folder / "launch")
    stub = folder / "stub"
    stub.write_text(STUB)
    stub.chmod(0o755)
    (folder / "launch" / "setup_env.sh").write_text(f"echo {stub}\n")
    (folder / "launch" / "run.sh").write_text(f'{stub} "$@"\n')
    return folder


@pytest.fixture(scope="module")
def calls(tmp_path_factory):
    """Command lines of a pipeline with SEED 7 and an extra flag, in order: NPROC, then words; SAVE is /save."""
    folder = checkout(tmp_path_factory.mktemp("pipeline") / "checkout")
    save = folder / "save"
    save.mkdir()
    done = launch(["--gamma", "0.9"], "rlhf_pipeline", folder, SEED="7", SAVE=str(save))
    assert done.returncode == 0, done.stderr
    assert (folder / "save.old-1").is_dir() and not save.exists()
    lines = [line.removeprefix("called ") for line in done.stdout.splitlines() if line.startswith("called ")]
    return [[word.replace(str(save), "/save") for word in json.loads(line)] for line in lines]


def parsed(call: list[str]):
    """A call of a program, as that program reads it; config files are those of this checkout."""
    argv = [str(ROOT / word) if word.startswith("configs/") else word for word in call[2:]]
    return arguments.parse(argv, int(call[0]), PROGRAMS[call[1]])


def flags_of(call: list[str]) -> dict[str, str]:
    """Flags of a call with the word that follows each."""
    return {word: following for word, following in itertools.pairwise(call) if word.startswith("--")}


def test_stages_come_in_order_and_every_command_is_valid(calls):
    names = [call[1] for call in calls]
    tools = ["tools/make_prompts.py", "tools/train_tokenizer.py", "tools/train_tokenizer.py"]
    preferences = ["evaluate", "evaluate", "tools/make_preferences.py"]
    assert names == [*tools, "train_sft", *preferences, "train_sft", "train_reward", "train_rl", "tools/rlhf_report.py"]
    for call in calls:
        if call[1] in PROGRAMS:
            assert parsed(call).settings.seed == 7
        else:
            load_tool(Path(call[1]).stem).parse_arguments(call[2:])
    assert parsed(calls[-2]).settings.gamma == 0.9


def test_each_stage_reads_the_output_of_an_earlier_one(calls):
    """And trains on training prompts alone."""
    assert calls[-1][2] == "/save"
    written = {"/save/data/train.jsonl", "/save/data/heldout.jsonl"}
    for call in calls[1:-1]:
        flags = flags_of(call)
        read = {path for flag, path in flags.items() if flag not in ("--save", "--out") and path.startswith("/save/")}
        assert read and read <= written, call
        assert "heldout" not in flags.get("--prompts", "")
        if out := flags.get("--out") or flags.get("--save"):
            written |= {out, f"{out}.model", f"{out}/train.jsonl", f"{out}/heldout.jsonl", f"{out}/samples.jsonl"}


def test_models_agree_between_stages_and_the_reward_model_has_its_own_tokenizer(calls):
    policy, train_samples, _, reward_sft, reward_model, rl = [parsed(call) for call in calls if call[1] in PROGRAMS]
    shapes = [
        [(a.num_layers, a.hidden_size, a.ffn_hidden_size, a.num_attention_heads, a.make_vocab_size_divisible_by)
         for a in args]
        for args in (
            [policy.roles["actor"].megatron, train_samples.roles["actor"].megatron, rl.roles["actor"].megatron],
            [reward_sft.roles["actor"].megatron, reward_model.roles["reward"].megatron, rl.roles["reward"].megatron],
        )
    ]  # fmt: skip
    assert [len(set(of_model)) for of_model in shapes] == [1, 1]
    read = [(each.tokenizer_type, each.tokenizer_model, each.chat_template)
            for each in (reward_sft.roles["actor"], reward_model.roles["reward"], rl.roles["reward"])]  # fmt: skip
    assert set(read) == {("HuggingFaceTokenizer", "/save/data/reward-tokenizer", "tokenizer")}
    assert rl.roles["actor"].tokenizer_type == "SentencePieceTokenizer"
    assert reward_model.roles["reward"].megatron.seq_length == rl.roles["reward"].megatron.seq_length
    weights = {term.name: term.weight for term in rl.rewards}
    assert weights == {"model": 1.0, "exact-match": 0.0, "reasoning-gym": 0.0}
    limit = float(calls[-1][calls[-1].index("--max-kl") + 1])
    assert limit == 1.5 * rl.settings.kl_target


def test_the_files_that_configs_name_are_those_of_a_run_without_variables(calls):
    """So that a stage can be started alone: `--config configs/rlhf_ppo.yaml`."""
    for flags in map(flags_of, calls):
        config = yaml.safe_load((ROOT / flags["--config"]).read_text()) if "--config" in flags else {}
        for key, value in config.items():
            if isinstance(value, str) and value.startswith("runs/"):
                assert value.replace("runs/rlhf", "/save") == flags[f"--{key}"], (flags["--config"], key)


def test_wrong_variables_are_reported_in_one_line_before_anything_is_made(tmp_path):
    done = launch([], "rlhf_pipeline", SEED="one", SAVE=str(tmp_path / "run"))
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"rlhf_pipeline: SEED=one: allowed is .*\n", done.stderr) and not list(tmp_path.iterdir())
