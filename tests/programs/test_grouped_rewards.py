"""Rewards of whole groups in evaluations; those of runs are in tests/laws."""

import json

from tests.helpers.evaluation import evaluate_argv, run_evaluate
from tests.laws.plug_ins import check_scored


def test_the_samples_of_a_held_out_prompt_are_a_group(tmp_path):
    flags = "--reward tests.laws.plug_ins:novelty --eval-responses 3 --eval-temperature 1 --eval-samples 5"
    found = []
    for size in (1, 2):
        run_evaluate(evaluate_argv(tmp_path / str(size), flags), size)
        found.append((tmp_path / str(size) / "samples.jsonl").read_bytes())
    assert found[0] == found[1] and check_scored([json.loads(line) for line in found[0].splitlines()], 3) < 5
