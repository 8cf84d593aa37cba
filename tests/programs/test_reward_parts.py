"""GDPO in whole runs: the parts of the reward reach the advantages; and rewards of whole groups in evaluations."""

import json
import statistics

import pytest

from megarl import arguments
from tests.helpers.evaluation import evaluate_argv, run_evaluate
from tests.helpers.programs import rl_argv, rows_of, train
from tests.helpers.tiers import by_default
from tests.laws.plug_ins import check_scored

SAMPLES = 4
PARTS = "tests.helpers.programs:graded_reward", "tests.helpers.programs:digit_reward"
FLAGS = (
    f"--advantage gdpo --whiten-advantages false --kl-coefficient 0 --samples-per-prompt {SAMPLES} --minibatch-size 24"
    f" --ppo-epochs 1 --train-iters 2 --lr 1e-4 --reward {PARTS[0]}+0.5*{PARTS[1]}+0*exact-match --token-samples 24"
)
RUNS = {
    "alone": (1, ""),
    "a penalty": (1, "--overlong-buffer 2 --overlong-penalty 0.3"),
    "roles apart": (2, "--role-map actor=0;reward=1;rollout=0"),
    "replicas, filter": (2, "--group-filter reward"),
    "filter of another rank": (2, "--role-map actor=0;reward=1;rollout=1 --group-filter reward --dynamic-sampling"),
}


def by_hand(rows: list[dict], penalty: float) -> dict[int, float]:
    """{sequence: Σ w (R − mean_G) / (std_G + 1e-6)}"""
    found = {row["sequence"]: 0.0 for row in rows}
    columns = [(weight, [row["reward_values"][name] for row in rows]) for weight, name in zip((1.0, 0.5), PARTS)]
    if penalty:
        columns.append((penalty, [row["reward_parts"]["overlong"] / penalty for row in rows]))
    for weight, values in columns:
        for start in range(0, len(rows), SAMPLES):
            group = values[start : start + SAMPLES]
            for row, value in zip(rows[start:], group):
                part = (value - statistics.fmean(group)) / (statistics.stdev(group) + 1e-6)
                found[row["sequence"]] += weight * part * (len(set(group)) > 1)
    return found


@pytest.mark.parametrize("name", by_default(RUNS, ("a penalty", "filter of another rank")))
def test_advantages_are_sums_over_parts(name, tmp_path):
    size, flags = RUNS[name]
    train("rl", rl_argv(tmp_path, f"{FLAGS} {flags}"), size)
    for step in (1, 2):
        rows = rows_of(tmp_path, step)
        rows = sorted((row for row in rows if row.get("kept", True)), key=lambda row: row["sequence"])
        tokens = [json.loads(line) for line in (tmp_path / f"tokens/step_{step:08d}.jsonl").read_text().splitlines()]
        expected = by_hand(rows, 0.3 if "overlong" in flags else 0.0)
        assert tokens and any(abs(value) > 0.1 for value in expected.values())
        for row in tokens:
            advantages = row["advantages"]
            assert advantages == pytest.approx([expected[row["sequence"]]] * len(advantages), rel=1e-4, abs=1e-5)


def test_a_reward_of_one_part_is_said():
    argv = rl_argv("none", "--advantage gdpo --kl-coefficient 0 --reward exact-match+0*length")
    (warning,) = arguments.parse(argv, 1).warnings
    assert warning.startswith("--advantage gdpo: --reward exact-match+0*length has one part that counts")


def test_the_samples_of_a_held_out_prompt_are_a_group(tmp_path):
    flags = "--reward tests.laws.plug_ins:novelty --eval-responses 3 --eval-temperature 1 --eval-samples 5"
    found = []
    for size in (1, 2):
        run_evaluate(evaluate_argv(tmp_path / str(size), flags), size)
        found.append((tmp_path / str(size) / "samples.jsonl").read_bytes())
    assert found[0] == found[1] and check_scored([json.loads(line) for line in found[0].splitlines()], 3) < 5
