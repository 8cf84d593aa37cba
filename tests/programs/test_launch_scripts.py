"""The scripts of launch/: wrong use ends with status 2 and one line; what a warm start and the quickstarts run."""

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml

from megarl import arguments
from tests.helpers.launch_scripts import launch
from tests.helpers.programs import ROOT, metrics

# Ranks of actor, critic, reward and reference; the actor's expert-parallel size; chunks of a step.
SPLIT = {
    "quickstart": ([[0, 1], [2, 3], [2, 3], [2, 3]], 1), "moe_quickstart": ([[0, 1], [2], [3], [3]], 2),
}  # fmt: skip


@pytest.mark.parametrize("arguments, variables, says", [
    ([], {}, "no program given"), (["train"], {}, "unknown program train"), (["train_sft"], {"NPROC": "0"}, "NPROC=0"),
    (["train_sft"], {"NPROC": "two"}, "NPROC=two"), (["train_sft", "--lr-rate", "1"], {}, "--lr-rate"),
    (["train_sft"], {"MAX_RESTARTS": "-1"}, "MAX_RESTARTS=-1"),
])  # fmt: skip
def test_wrong_use_is_reported_in_one_line(arguments, variables, says):
    done = launch(arguments, **variables)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_warm_start_makes_data_and_a_policy_on_two_ranks(tmp_path):
    flags = ["--train-iters", "2", "--eval-interval", "2", "--lr-warmup-iters", "1"]
    done = launch(flags, "warm_start", CONFIG="moe_quickstart", SEED="3", SAVE=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "data" / "train.jsonl").read_text().splitlines()) == 4000
    assert json.loads((tmp_path / "data" / "prompts.json").read_text())["seed"] == 3
    rows = metrics(tmp_path / "sft")
    assert sorted(rows) == [1, 2] and rows[2]["eval/loss"] > 1
    settings = yaml.safe_load((tmp_path / "sft" / "settings.yaml").read_text())
    actor = settings["roles"]["actor"]["megatron"]
    assert (settings["megarl"]["seed"], actor["num_experts"], actor["world_size"]) == (3, 8, 2)
    assert (tmp_path / "sft" / "checkpoints" / "latest").exists()


@pytest.mark.parametrize("name, variables, says", [
    ("warm_start", {}, "SAVE is not set"), ("warm_start", {"SAVE": "S", "SEED": "-1"}, "SEED=-1: allowed is"),
    ("warm_start", {"SAVE": "S", "CONFIG": "moe"}, "CONFIG=moe: configs/moe_sft.yaml does not exist"),
    ("quickstart", {"SAVE": "S", "CONFIG": "moe"}, "CONFIG=moe: allowed: quickstart, moe_quickstart"),
    ("moe_quickstart", {"SAVE": "S", "SEED": "one"}, "SEED=one: allowed is"),
])  # fmt: skip
def test_wrong_variables_are_reported_in_one_line_before_anything_is_made(name, variables, says, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    done = launch([], name, **{key: str(run) if value == "S" else value for key, value in variables.items()})
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr and len(done.stderr.splitlines()) == 1
    assert list(tmp_path.rglob("*")) == [run]


def checkout(folder: Path) -> Path:
    """A checkout of the quickstarts whose other scripts only say how they were called."""
    shutil.copytree(ROOT / "launch", folder / "launch")
    (folder / "launch" / "setup_env.sh").write_text("echo python\n")
    for name in ("warm_start", "run"):
        said = f"{name}: ${{NPROC:-}} $CONFIG $SEED $SAVE"
        (folder / "launch" / f"{name}.sh").write_text(f'printf "%s\\n" "{said}" "$@"\n')
    return folder


@pytest.mark.parametrize("config", SPLIT)
def test_a_quickstart_hands_over_its_files_layout_and_flags(config, tmp_path):
    save = tmp_path / "earlier"
    (save / "data").mkdir(parents=True)
    done = launch(["--gamma", "0.9"], config, checkout(tmp_path / "checkout"), SEED="7", SAVE=str(save))
    assert done.returncode == 0, done.stderr
    assert f"warm_start:  {config} 7 {save}\n\nquickstart: PPO" in done.stdout
    after = done.stdout.partition(f"run: 4 {config} 7 {save}\n")[2]
    handed = after.partition("\n\nquickstart: done")[0].splitlines()
    assert handed[:3] == ["train_rl", "--config", f"configs/{config}.yaml"] and not save.exists()
    assert (tmp_path / "earlier.old-1" / "data").is_dir()
    program = arguments.parse(["--config", str(ROOT / handed[2]), *handed[3:]], 4)
    settings, roles = program.settings, program.roles
    assert (settings.save, settings.prompts, settings.seed) == (f"{save}/ppo", f"{save}/data/train.jsonl", 7)
    assert (settings.eval_prompts, settings.gamma) == (f"{save}/data/heldout.jsonl", 0.9)
    assert settings.tokenizer_model == f"{save}/data/tokenizer.model"
    models = [roles[name].megatron for name in ("actor", "critic", "reference")]
    assert [args.pretrained_checkpoint for args in models] == [f"{save}/sft"] * 3
    ranks, experts = SPLIT[config]
    assert [list(roles[name].ranks) for name in ("actor", "critic", "reward", "reference")] == ranks
    sizes = [(args.tensor_model_parallel_size, args.expert_model_parallel_size) for args in models]
    assert sizes == [(1, experts), (1, 1), (1, 1)]


@pytest.mark.parametrize("config", SPLIT)
def test_a_warm_start_has_the_shape_of_what_starts_from_it(config):
    texts = [(ROOT / "configs" / f"{config}{end}.yaml").read_text() for end in ("", "_sft")]
    shapes = [re.search(r"^num-layers: .*^max-response-length: \d+$", text, re.MULTILINE | re.DOTALL) for text in texts]
    assert shapes[0][0] == shapes[1][0]
    shape, files = yaml.safe_load(shapes[0][0]), [yaml.safe_load(text) for text in texts]
    experts = (shape.get("num-experts"), shape.get("moe-router-topk"))
    assert experts == ((8, 2) if config == "moe_quickstart" else (None, None))
    assert [file["prompts"] for file in files] == [f"runs/{config}/data/train.jsonl"] * 2
    assert files[0]["pretrained-checkpoint"] == files[1]["save"] == f"runs/{config}/sft"
