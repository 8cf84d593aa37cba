"""Benchmarks of drafts, of decode steps of recurrent layers, of slow tools and of routes: the figures of small runs."""

import json

import pytest

from tests.helpers.models.attention_inputs import needs_kernels
from tests.helpers.programs import inputs, metrics, rl_argv
from tests.helpers.tools import run_tool
from tests.helpers.worlds import run_world
from tools.bench import choosing_step, recurrent_step, router_replay

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


SMALL_STEPS = "--requests 1,3 --hidden 64 --heads 4 --channels 16 --rounds 2"


def measured(rank: int) -> list[dict]:
    return recurrent_step.measure(recurrent_step.parse(SMALL_STEPS.split()))


@needs_kernels
def test_each_side_has_a_row_for_each_number_of_requests():
    (found,) = run_world(measured, 1)
    assert [(row["requests"], row["side"]) for row in found] == [(n, x) for n in (1, 3) for x in recurrent_step.SIDES]
    assert all(len(row["seconds"]) == 2 and row["ratio"] > 0 for row in found)
    assert all(row["ratio"] == 1.0 for row in found if row["side"] == recurrent_step.NET)
    assert len(recurrent_step.table(found, markdown=True).splitlines()) >= 7


def of_choices(rank: int) -> list[dict]:
    small = "--tokens 90 --short 20 --keys 40 --steps 6 --hidden 64 --heads 2"
    return choosing_step.measure(choosing_step.parse(small.split()))


@needs_kernels
def test_both_sides_score_and_decode_sequences_below_and_above_the_choice():
    (found,) = run_world(of_choices, 1)
    rows = [(20, "scores"), (20, "decode step"), (90, "scores"), (90, "decode step")]
    assert [(row["tokens"], row["what"]) for row in found] == rows
    for row in found:
        assert row["ratio"] > 0 and row["seconds"].keys() == choosing_step.SIDES.keys()
        assert all(len(times) == (6 if row["what"] == "scores" else 3) for times in row["seconds"].values()), row
    assert len(choosing_step.table(found, markdown=True).splitlines()) >= 5


@pytest.mark.parametrize("tool, flags, says", [
    (recurrent_step, "--requests 0", "--requests 0 --rounds 20: allowed are whole numbers above 0"),
    (choosing_step, "--short 512", "--short 512 --keys 512 --tokens 8192 --steps 16: allowed are ascending numbers"),
])  # fmt: skip
def test_wrong_numbers_are_refused(tool, flags, says, capsys):
    with pytest.raises(SystemExit):
        tool.parse(flags.split())
    assert says in capsys.readouterr().err


SMALL = ("--prompts", 1, "--turns", 2, "--sleep", 0.01, "--steps", 2, "--rounds", 1, "--hidden", 32)


@pytest.mark.long
def test_all_sides_generate_the_same(tmp_path):
    file = tmp_path / "figures.json"
    result = run_tool("bench/environments", *SMALL, "--json", file, OMP_NUM_THREADS="1")
    assert result.returncode == 0, result.stderr
    found = json.loads(file.read_text())
    assert found["turns"] > 8 and set(found["best_cpu"]) == {"environment", "agent", "program"}
    assert set(found["best"]) == {
        f"{side}, {pace}" for side in ("environment", "agent", "program") for pace in ("awake", "asleep")
    }
    assert "program: asleep" in result.stdout


@pytest.mark.long
def test_runs_of_one_folder_follow_each_other(tmp_path):
    """Each run begins anew where an earlier one was."""
    file = tmp_path / "figures.json"
    result = run_tool("bench/router_replay", "--steps", 1, "--rounds", 2, "--json", file, OMP_NUM_THREADS="1")
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads(file.read_text())["rounds_s"]
    assert {kind: len(seconds) for kind, seconds in found.items()} == dict.fromkeys(router_replay.KINDS, 2)
