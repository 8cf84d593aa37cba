"""The comparison of rollouts with and without drafts: a small run's figures."""

import json

import pytest

from tests.helpers.programs import inputs, metrics, rl_argv
from tests.helpers.tools import run_tool

FLAGS = "--advantage grpo --kl-coefficient 0 --temperature 0.05 --eval-interval 1 --train-iters 3"


@pytest.mark.long
def test_the_last_training_steps_count(tmp_path):
    file, flags = tmp_path / "figures.json", f"{FLAGS} --eval-prompts {inputs() / 'heldout.jsonl'}"
    argv = rl_argv(tmp_path / "run", flags, warm_start=False)
    result = run_tool("bench/speculative", "--last", 2, "--json", file, *argv, OMP_NUM_THREADS="1")
    assert result.returncode == 0, result.stderr
    found = json.loads(file.read_text())
    assert found["training_steps"] == 2 and len(found["rows"]) == 3  # no evaluation
    steps = metrics(tmp_path / "run")
    assert [row["drafts"]["steps"] for row in found["rows"]] == [steps[i]["rollout/decode_steps"] for i in (1, 2, 3)]
    for side in ("plain", "drafts"):
        assert found[side] == {
            name: sum(row[side][name] for row in found["rows"][1:]) for name in ("s", "steps", "requests")
        }
    assert found["ratios"]["steps"] == found["plain"]["steps"] / found["drafts"]["steps"]
    assert "decode steps" in result.stdout.splitlines()[-1]
