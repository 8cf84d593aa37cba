"""The agents of launch/agent_quickstart.sh learn what environments answer: about ten minutes each."""

import json
from pathlib import Path

import gymnasium
import pytest

from megarl.environments.adapters.gymnasium_env import FrozenLake
from megarl.environments.built_in import OFFSET
from tests.helpers.launch_scripts import launch
from tests.helpers.programs import metrics
from tests.references.value_iteration import optimal_values

pytestmark = pytest.mark.nightly


def train(save: Path, task: str, environment: str = "") -> dict[str, float]:
    """Trains an agent; returns the metrics of its last step."""
    done = launch([], "agent_quickstart", SAVE=str(save), TASK=task, ENVIRONMENT=environment, seconds=7200)
    assert done.returncode == 0, done.stderr
    rows = metrics(save / "rl")
    return rows[max(rows)]


def greedy_episodes(save: Path, config: str, flags: str = "") -> list[dict]:
    """Samples of the held-out prompts, by the trained policy."""
    data = f"--eval-prompts {save}/data/heldout.jsonl --tokenizer-model {save}/data/tokenizer.model"
    flags = f"--config configs/{config}.yaml {data} --load {save}/rl --save {save}/greedy --eval-temperature 0 {flags}"
    done = launch(["evaluate", *flags.split()], seconds=600)
    assert done.returncode == 0, done.stderr
    return list(map(json.loads, (save / "greedy/samples.jsonl").read_text().splitlines()))


def test_numbers_are_found_by_the_answers_and_not_without_them(tmp_path):
    """Above 60 % of 512 numbers; the control, whose answers say nothing, cannot pass 4 of 15."""
    accuracy = {
        environment: train(tmp_path / environment, "guess-number", environment)["eval/accuracy"]
        for environment in ("guess-number", "guess-number-blind")
    }
    assert accuracy["guess-number"] > 0.6
    assert accuracy["guess-number-blind"] < 4 / 15 + 3 * (4 / 15 * 11 / 15 / 512) ** 0.5


def test_products_are_what_the_tool_says(tmp_path):
    """Sampled answers are right; with a tool whose results are too large, answers are too large by as much."""
    assert train(tmp_path, "products")["eval/accuracy"] > 0.8
    check_offset(tmp_path)


def check_offset(save: Path):
    rows = greedy_episodes(save, "agent_products", "--environment calculator-offset")
    carried = [row["turns"][-1]["text"] == str(int(row["answer"]) + OFFSET) for row in rows]
    assert len(rows) == 256 and sum(carried) > 0.8 * len(rows)


def test_the_lake_is_crossed_as_value_iteration_crosses_it(tmp_path):
    assert train(tmp_path, "frozen-lake")["eval/accuracy"] == 1.0
    check_ways(tmp_path)


def check_ways(save: Path):
    environment = gymnasium.make("FrozenLake-v1", map_name="4x4", is_slippery=False)
    values, best = optimal_values(environment, discount=0.9)
    for row in greedy_episodes(save, "agent_frozen_lake"):
        state, earned = environment.reset()[0], 0.0
        for number, turn in enumerate(row["turns"]):
            action = FrozenLake.WORDS.index(turn["text"])
            assert action in best[state]
            state, reward, *_ = environment.step(action)
            earned += 0.9**number * reward
        assert earned == pytest.approx(values[0])
