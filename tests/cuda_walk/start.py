"""Starts the process that walks: CUDA's libraries are replaced before it begins."""

import itertools
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import programs

ROOT = Path(__file__).parents[2]
compiler = shutil.which("cc") or shutil.which("gcc")
needs_compiler = pytest.mark.skipif(compiler is None, reason="needs a C compiler")


def stand_ins(folder: Path) -> dict[str, str]:
    """The environment of a process in which CUDA's libraries are replaced.

    `folder`: for the compiled stand-in.
    """
    library = folder / "libcudart.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-w", "-o", library, Path(__file__).parent / "runtime.c"], check=True)
    shutil.copy(library, folder / "libcuda.so.1")
    environment = programs.environment(LD_PRELOAD=str(library), LD_LIBRARY_PATH=str(folder), CUDA_VISIBLE_DEVICES="0")
    environment.pop("TRITON_INTERPRET", None)
    return environment


def walks(folder: Path, names: list[str]) -> dict[str, dict | list]:
    """What was counted in scenarios of `rollout.py` and `training.py`, by name; fails where one broke.

    Args:
        folder: for the compiled stand-in.
    """
    environment = stand_ins(folder)
    command = [sys.executable, "-W", "ignore", "-m", "tests.cuda_walk", *names]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    found = {row["name"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert set(found) == set(names), done.stderr[-3000:]
    broken = {name: (row["error"], row["place"]) for name, row in found.items() if "error" in row}
    assert not broken, broken
    return {name: row["counts"] for name, row in found.items()}


def check_graphs(steps: list[dict]):
    """Fails unless a decode step was captured once and then replayed, without launches of its kernels one by one."""
    captured, replayed = steps[-1]["graphs"]
    assert captured == 1 and replayed >= 5
    pairs = itertools.pairwise(steps)
    later = [step for before, step in pairs if step["graphs"][1] > before["graphs"][1] and before["graphs"][0]]
    assert len(later) >= replayed // 2  # the step that captures replays, too, and a step may launch the next one
    for step in later:
        assert not [name for name in step["launches"] if "megarl" in name or "mm" in name or "attn" in name]
        assert sum(step["sends"].values()) <= 2
