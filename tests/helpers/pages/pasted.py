"""Shell blocks of the documentation, run by bash as a user pastes them, up to the programs that they start.

The launch scripts really run. A program that would train, serve, install or ask another machine is a recorder in the
place of it, which writes down how it was called; the caller parses that with the program's own parser.
"""

import json
import re
import shutil
import subprocess
from pathlib import Path

from tests.helpers.folders.published_configs import PUBLISHED
from tests.helpers.programs import ROOT

RECORDED = (
    "python python3 python3.12 .venv/bin/python torchrun megarl pip curl lm_eval git docker srun sbatch"
    " launch/setup_env.sh launch/serve_and_evaluate.sh"
    " tests/run.sh tools/gpu_check.sh tools/te_check.sh tools/build_docs.sh"
).split()
UNIT, RECORD = "\x1f", "\x1e"
RECORDER = r"""#!/usr/bin/env bash
name=${0#"$PAGE/"}
printf '%s\x1f' "${name#bin/}" "$@" >>"$PAGE/calls"
printf '\x1e' >>"$PAGE/calls"
# What launch scripts read: the interpreter, and a plan that fits.
[[ $name != launch/setup_env.sh ]] || echo python
[[ " $* " != *" --least-recompute "* ]] || echo recompute:
"""
SHAPE = """
num-layers: 4
hidden-size: 64
num-attention-heads: 4
tokenizer-model: my/tokenizer.model
prompts: my/train.jsonl
max-prompt-length: 256
max-response-length: 256
lr: 1.0e-5
"""
# Files that a page leaves to its reader: what it calls them, and what they are here.
CONFIGS = ("my_run.yaml", "my.yaml", "mine.yaml", "my_model.yaml", "reward.yaml", "ppo.yaml")
HF_FOLDERS = {
    "models/Qwen3-0.6B": "qwen3_0.6b", "/models/Qwen3-8B": "qwen3_8b", "/models/Qwen3-30B-A3B": "qwen3_30b_a3b",
    "models/Qwen3-30B-A3B-Base": "qwen3_30b_a3b", "models/Qwen3-Next-80B-A3B": "qwen3_next_80b_a3b",
    "models/small": "qwen3_0.6b", "models/large": "qwen3_8b", "models/my-model": "qwen3_0.6b",
    "models/math": "qwen3_8b", "runs/coder": "qwen3_8b", "models/judge": "qwen3_8b", "DIR": "qwen3_0.6b",
    "models/Qwen2.5-VL-3B": "qwen2.5_3b", "runs/smollm2-135m-instruct": "qwen3_0.6b",
    "models/granite-3.3-2b": "qwen3_0.6b",
}  # fmt: skip
EMPTY = ("env/bin/activate", "apex/setup.py", "dist/megarl-0.1.0-py3-none-any.whl", "megarl-17.log")


def page_folder(folder: Path) -> Path:
    """A checkout whose programs are recorders, with the files that pages leave to their reader."""
    shutil.copytree(ROOT / "launch", folder / "launch")
    shutil.copytree(ROOT / "configs", folder / "configs")
    for name in RECORDED:
        path = folder / (name if "/" in name else f"bin/{name}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(RECORDER)
        path.chmod(0o755)
    for name in CONFIGS:
        (folder / name).write_text(SHAPE)
    for name in EMPTY:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    for name, model in HF_FOLDERS.items():
        place = folder / name.removeprefix("/")
        place.mkdir(parents=True, exist_ok=True)
        (place / "config.json").write_text(json.dumps(PUBLISHED[model][0]))
    return folder


def run(text: str, folder: Path) -> tuple[list[tuple[str, ...]], str, str]:
    """(the programs that a shell block called, with their arguments; what it printed; what bash said if it failed)."""
    calls = folder / "calls"
    calls.write_text("")
    env = {"PAGE": str(folder), "HOME": str(folder), "LANG": "C.UTF-8"}
    env["PATH"] = f"{folder / 'bin'}:/usr/bin:/bin"
    text = re.sub(r"(?<=[ =\"])/models/", "models/", text)
    command = ["bash", "-e", "-o", "pipefail", "-c", text]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    found = [tuple(record.split(UNIT)[:-1]) for record in calls.read_text().split(RECORD)[:-1]]
    return found, done.stdout, "" if done.returncode == 0 else f"status {done.returncode}: {done.stderr.strip()}"
