"""--evals: each named set is evaluated as it would be alone, in every layout; the best checkpoint by one of them."""

import json
from pathlib import Path

import pytest

from megarl.checkpoint import manifest
from tests.helpers.evaluation import evaluate_argv, run_evaluate
from tests.helpers.forked_programs import refusal
from tests.helpers.programs import inputs, metrics, rl_argv, train, write_lines
from tests.helpers.tiers import by_default, long
from tools import _metric_catalog as metric_catalog

SAMPLED = "--eval-responses 2 --eval-temperature 0.7"


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    """Two halves of the held-out prompts; the second has tasks."""
    folder = tmp_path_factory.mktemp("evals")
    rows = [json.loads(line) for line in (inputs() / "heldout.jsonl").read_text().splitlines()]
    graded = [row | {"task": ("low", "high")[i % 2]} for i, row in enumerate(rows[8:])]
    return {"first": write_lines(folder / "first.jsonl", rows[:8]), "rest": write_lines(folder / "rest.jsonl", graded)}


def evals(files: dict[str, Path]) -> str:
    return "--evals " + " ".join(f"{name}={path}" for name, path in files.items())


def evaluated(save: Path, flags: str, size: int = 1, prompts: Path | None = None) -> tuple[dict, list[dict]]:
    """(metrics, samples) of the warm start; `prompts`: of --eval-prompts, which `flags` name otherwise."""
    command = evaluate_argv(save, f"{SAMPLED} {flags}", prompts)
    if prompts is None:
        place = command.index("--eval-prompts")
        del command[place : place + 2]
    run_evaluate(command, size)
    rows = [json.loads(line) for line in (save / "samples.jsonl").read_text().splitlines()]
    return json.loads((save / "evaluation.json").read_text())["metrics"], rows


@pytest.mark.parametrize(
    "size, flags", by_default([(1, ""), (2, ""), (2, "--tensor-model-parallel-size 2")], [(2, "")])
)
def test_a_named_set_is_evaluated_as_alone(size, flags, files, tmp_path):
    found, rows = evaluated(tmp_path / "all", f"{evals(files)} {flags}", size)
    expected, samples = {}, []
    for name, path in files.items():
        alone, own = evaluated(tmp_path / name, "", 1, path)
        expected |= {f"eval/{name}/{metric.removeprefix('eval/')}": value for metric, value in alone.items()}
        samples += [row | {"eval": name} for row in own]
    mean = sum(expected[f"eval/{name}/accuracy"] for name in files) / len(files)
    assert found == {"eval/accuracy": mean} | expected and rows == samples
    assert "eval/rest/low/accuracy" in found and not metric_catalog.unknown(found)


@pytest.mark.parametrize("size", [1, long(2)])
def test_the_best_checkpoint_is_that_of_the_named_metric(size, files, tmp_path):
    flags = f"--train-iters 2 --eval-interval 1 --lr 3e-3 {evals(files)} {SAMPLED} --reward exact-match+length"
    flags += " --reward-length 2 --best-metric rest/high/reward/length"
    train("rl", rl_argv(tmp_path, flags), size)
    values = {step: row["eval/rest/high/reward/length"] for step, row in metrics(tmp_path).items()}
    assert set(values) == set(range(3)) and len(set(values.values())) > 1
    step = max(range(1, 3), key=lambda step: (values[step], -step))
    assert (tmp_path / "checkpoints" / "best").read_text().strip() == f"step_{step:08d}"
    last = manifest.read(tmp_path / "checkpoints" / "step_00000002", "--load")
    assert last["best"] == {"rest/high/reward/length": values[step], "step": step}
    assert {"evals first", "evals rest"} < last["data"].keys()


def test_a_metric_that_no_evaluation_has_is_refused(files, tmp_path):
    line = refusal(rl_argv(tmp_path / "run", f"{evals(files)} --eval-interval 1 --best-metric first/low/accuracy"))
    assert "--best-metric first/low/accuracy: no evaluation has it; allowed: accuracy, first/accuracy, " in line
    assert "rest/low/accuracy" in line
