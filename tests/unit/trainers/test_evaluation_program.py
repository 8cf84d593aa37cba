"""The program evaluate: metrics equal in every layout, to those of training and of its samples; wrong input."""

import functools
import json
import re
from pathlib import Path

import pytest

from megarl.errors import UsageError
from megarl.trainers.evaluator import maj_at_k, pass_at_k
from tests.helpers.evaluation import evaluate_argv, run_evaluate
from tests.helpers.forked_programs import launch
from tests.helpers.programs import (
    inputs,
    metrics,
    program,
    rl_argv,
    sft_argv,
    torchrun,
    train,
    write_lines,
)
from tests.helpers.tiers import by_default, long
from tools import _metric_catalog as metric_catalog

SAMPLED = "--eval-responses 4 --eval-temperature 0.7 --eval-k 1,2,3,4"


@functools.cache
def prompts_of_two_tasks(folder: Path) -> Path:
    """Held-out prompts: one in three is easy, one hard, and one of no task."""
    rows = [json.loads(line) for line in (inputs() / "heldout.jsonl").read_text().splitlines()]
    tasks = ({"task": "hard"}, {"task": "easy"}, {})
    return write_lines(folder / "tasks.jsonl", [row | tasks[i % 3] for i, row in enumerate(rows)])


@functools.cache
def result(folder: Path, flags: str, size: int = 1, layout: str = "") -> tuple[dict, bytes]:
    """evaluation.json and the samples file of the warm start in a layout."""
    save = folder / f"{size} {flags} {layout}"[:120]
    printed = run_evaluate(evaluate_argv(save, f"{flags} {layout}", prompts_of_two_tasks(folder)), size)
    assert not any(printed[1:])
    found = json.loads((save / "evaluation.json").read_text())
    assert not metric_catalog.unknown(found["metrics"])
    check_table(printed[0], found["metrics"])
    return found, (save / "samples.jsonl").read_bytes()


def check_table(text: str, found: dict):
    head, *rows = (re.split(r" {2,}", line.strip()) for line in text.splitlines())
    assert len({len(line) for line in text.splitlines()}) == 1
    several = ["easy", "hard"] if "eval/easy/accuracy" in found else []
    assert head[0] == "task" and [row[0] for row in rows] == ["all", *several]
    for task, *cells in rows:
        prefix = "eval/" if task == "all" else f"eval/{task}/"
        for name, cell in zip(head[1:], cells, strict=True):
            assert cell == (f"{found[prefix + name]:.4f}" if prefix + name in found else "-")


# -- numbers -----------------------------------------------------------------------------------------------------

LAYOUTS = {
    "DP2": (2, ""),
    "TP2": (2, "--tensor-model-parallel-size 2"),
    "all different": (3, "--role-map actor=0-1;reward=2 --actor-pipeline-model-parallel-size 2"
                         " --rollout-pipeline-model-parallel-size 1"
                         " --rollout-tensor-model-parallel-size 2"),
}  # fmt: skip


@pytest.mark.parametrize("name", by_default(LAYOUTS, ("all different",)))
@pytest.mark.parametrize("flags", [long(""), SAMPLED])
def test_evaluation_does_not_depend_on_the_layout(name, flags, folder):
    assert result(folder, flags, *LAYOUTS[name]) == result(folder, flags)


def test_a_replica_may_have_no_prompt(folder):
    found = result(folder, "--eval-samples 1", 2)
    assert found == result(folder, "--eval-samples 1") and found[0]["prompts"] == 1


def test_metrics_equal_those_computed_from_the_samples(folder):
    found, samples = result(folder, SAMPLED)
    rows = [json.loads(line) for line in samples.splitlines()]
    assert found["prompts"] == 16 and [row["sequence"] for row in rows] == list(range(64))
    assert len({row["response"] for row in rows}) > 8
    groups = [rows[i : i + 4] for i in range(0, 64, 4)]
    assert all(len({row["prompt"] for row in group}) == 1 for group in groups)
    for task, prefix in ((None, "eval/"), ("easy", "eval/easy/"), ("hard", "eval/hard/")):
        chosen = [group for group in groups if task in (None, group[0]["task"])]
        counts = [sum(row["correct"] for row in group) for group in chosen]
        mean = functools.partial(pytest.approx, rel=1e-14)
        assert found["metrics"][f"{prefix}accuracy"] == mean(sum(counts) / (4 * len(chosen)))
        for k in (1, 2, 3, 4):
            expected = sum(pass_at_k(4, count, k) for count in counts) / len(chosen)
            assert found["metrics"][f"{prefix}pass@{k}"] == mean(expected)
            votes = [([row["extracted"] for row in group], [row["correct"] for row in group]) for group in chosen]
            assert found["metrics"][f"{prefix}maj@{k}"] == mean(sum(maj_at_k(*v, k) for v in votes) / len(chosen))
        lengths = [row["length"] for group in chosen for row in group]
        assert found["metrics"][f"{prefix}response_length_mean"] == mean(sum(lengths) / len(lengths))
    assert {row["task"] for row in rows} == {"easy", "hard", None}
    assert all(row["extracted"] == (row["response"].strip() or None if row["finished"] else None) for row in rows)
    whole = found["metrics"]
    assert 0 < whole["eval/pass@1"] == whole["eval/accuracy"] < whole["eval/pass@2"] < whole["eval/pass@4"] < 1


def test_samples_differ_by_seed_temperature_and_index(folder):
    _, samples = result(folder, SAMPLED)
    texts = [json.loads(line)["response"] for line in samples.splitlines()]
    assert any(len(set(texts[i : i + 4])) > 2 for i in range(0, 64, 4))
    assert result(folder, f"{SAMPLED} --seed 6")[1] != samples
    assert result(folder, f"{SAMPLED} --eval-temperature 0.2")[1] != samples
    few, first = result(folder, f"{SAMPLED} --eval-samples 3")
    assert few["prompts"] == 3 and samples.startswith(first) and len(first.splitlines()) == 12


# -- checkpoints -------------------------------------------------------------------------------------------------


def test_evaluating_a_checkpoint_gives_the_trainers_metrics(folder):
    """Before training those of the warm start, after it those of the run's best checkpoint and of a step's."""
    save, prompts = folder / "ppo", prompts_of_two_tasks(folder)
    flags = f"--train-iters 4 --eval-interval 1 --save-interval 1 --eval-prompts {prompts} {SAMPLED} --lr 3e-3"
    train("rl", rl_argv(save, flags), 2)
    rows = metrics(save)
    evaluated = {
        step: {name: value for name, value in row.items() if name.startswith("eval/")} for step, row in rows.items()
    }
    assert evaluated[0] == result(folder, SAMPLED)[0]["metrics"]
    assert len({row["eval/accuracy"] for row in evaluated.values()}) > 1
    _, best = max((row["eval/accuracy"], -step) for step, row in evaluated.items() if step)
    for load, step in ((save / "checkpoints" / "best", -best), (save / "checkpoints/step_00000002", 2)):
        run_evaluate(evaluate_argv(folder / "again", f"{SAMPLED} --tensor-model-parallel-size 2", prompts, load), 2)
        found = json.loads((folder / "again" / "evaluation.json").read_text())
        assert (found["step"], found["program"]) == (step, "train_rl")
        assert found["metrics"] == evaluated[step]


@pytest.mark.long
def test_a_policy_of_sharded_parameters_is_evaluated(tmp_path):
    untied, fsdp = "--untie-embeddings-and-output-weights", "--use-torch-fsdp2"
    train("sft", sft_argv(tmp_path / "sft", f"--train-iters 10 {untied} {fsdp}"), 2)
    for number, (size, flags) in enumerate([(1, untied), (2, f"{untied} {fsdp}")]):
        run_evaluate(evaluate_argv(tmp_path / f"{number}", flags, load=tmp_path / "sft"), size)
    one, other = ((tmp_path / name / "samples.jsonl").read_bytes() for name in ("0", "1"))
    assert one == other


# -- as users do -------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_through_torchrun(tmp_path):
    done = torchrun("megarl.evaluate", evaluate_argv(tmp_path / "out", SAMPLED), 2)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr and "Traceback" not in done.stderr, done.stderr
    head, row = done.stdout.splitlines()
    assert head.split()[:3] == ["task", "accuracy", "pass@1"] and row.startswith("all ")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["evaluation.json", "samples.jsonl"]


def test_a_reward_that_ends_an_evaluation_leaves_the_responses(tmp_path):
    argv = evaluate_argv(tmp_path / "run", "--reward tests.helpers.programs:broken_reward --eval-samples 16")
    status, _, err = launch(tmp_path, argv, "evaluate")
    file = tmp_path / "run" / "samples" / "failed_evaluation_rank_0.jsonl"
    assert status == 1 and f"; the samples of the step are in {file}" in err
    assert "; it failed on 16 of 16 responses; they get 0 (--reward-failure)" in err  # none is dropped
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(rows) == 16 and all("broken_reward" in row["failure"] and row["response"] for row in rows)


def test_without_save_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (printed,) = run_evaluate(evaluate_argv())
    assert printed.startswith("task ") and list(tmp_path.iterdir()) == []


REFUSALS = {
    "no prompts": ("--eval-prompts {none}", "--eval-prompts .*none: no such file"),
    "nowhere to save": ("--save {sft}/metrics.jsonl", "--save .*metrics.jsonl.* not a writable folder"),
    "unknown reward": ("--reward nothing", "--reward nothing: nothing is unknown"),
    "reward without answers": ("--reward reasoning-gym", "--eval-prompts .*:1: --reward reasoning-gym"),
    "a name twice": ("--evals a={sft} a={sft}", "--evals a=.*: allowed is NAME=FILES …, each name once"),
    "no name": ("--evals {sft}", "--evals .*sft: allowed is NAME=FILES"),
    "a named file is missing": ("--evals a={none}", "--evals a .*none: no such file"),
    "a named file is empty": ("--evals a={empty}", "--evals a .*: the file holds no prompt"),
    "the name of a task": ("--eval-prompts {tasks} --evals hard={heldout}", "--evals hard: a task of --eval-prompts"),
    "flag of another program": ("--ppo-epochs 2", "--ppo-epochs"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_wrong_input_is_rejected_in_one_line(case, tmp_path):
    from megarl.observe.timers import Timers
    from megarl.trainers.evaluation_program import evaluate

    flags, message = REFUSALS[case]
    (tmp_path / "empty").touch()
    files = {"heldout": inputs() / "heldout.jsonl", "tasks": prompts_of_two_tasks(tmp_path)}
    files |= {"none": tmp_path / "none", "empty": tmp_path / "empty", "sft": inputs() / "sft"}
    command = evaluate_argv(flags=flags.format(**files))
    with pytest.raises(UsageError, match=f"^{message}") as caught:
        evaluate(program("evaluate", command, 1), Timers())
    assert "\n" not in str(caught.value)


def test_prompts_are_required():
    from megarl.observe.timers import Timers
    from megarl.trainers.evaluation_program import evaluate

    command = evaluate_argv()
    place = command.index("--eval-prompts")
    with pytest.raises(UsageError, match="^--eval-prompts is missing: it has no default$"):
        evaluate(program("evaluate", command[:place] + command[place + 2 :], 1), Timers())


def test_a_check_starts_no_process_group(capsys):
    from megarl.observe.timers import Timers
    from megarl.trainers.evaluation_program import evaluate

    with pytest.raises(SystemExit) as ended:
        evaluate(program("evaluate", evaluate_argv(flags="--check --tensor-model-parallel-size 2"), 4), Timers())
    assert ended.value.code == 0 and capsys.readouterr().out.startswith("megarl: all input is valid for 4 ranks\n")


def test_the_table_has_a_line_a_task_and_a_column_a_metric():
    from megarl.trainers.evaluation_program import table

    found = {"accuracy": 0.5, "reward": 1.0, "reward/model": 2.0, "a/b/accuracy": 0.25, "a/b/reward/model": -1.0}
    lines = [line.split() for line in table({f"eval/{name}": value for name, value in found.items()}).splitlines()]
    assert lines == [
        ["task", "accuracy", "reward", "reward/model"],
        ["all", "0.5000", "1.0000", "2.0000"],
        ["a/b", "0.2500", "-", "-1.0000"],
    ]
