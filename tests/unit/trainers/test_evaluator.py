"""Metrics of an evaluation: of a prompt, and means over prompts and tasks."""

import itertools
import json
import types

import pytest

from megarl.checkpoint.resume import EVAL_PROMPTS
from megarl.data.prompts import load_prompts
from megarl.data.ragged import Ragged
from megarl.errors import UsageError
from megarl.flags.settings import Settings
from megarl.observe.timers import Timers
from megarl.trainers.evaluator import Evaluator, check_names, eval_ks, mean_metrics, prompt_metrics
from tests.helpers.evaluation import evaluate_argv, run_evaluate
from tests.helpers.programs import inputs, write_lines


def row(extracted: str | None, correct: bool, length: int = 3, reward: float | None = None) -> dict:
    reward = float(correct) if reward is None else reward
    found = {"extracted": extracted, "correct": correct, "reward": reward, "length": length}
    return found | {"finished": extracted is not None, "reward_values": {"exact-match": reward}}


def test_metrics_of_a_prompt():
    rows = [row("7", True, 1), row("8", False, 2), row("7", True, 3), row(None, False, 4, reward=-1.0)]
    assert prompt_metrics(rows, (1, 2, 4)) == {
        "accuracy": 0.5, "pass@1": 0.5, "pass@2": 1 - 1 / 6, "pass@4": 1.0, "mean@1": 0.5, "mean@2": 0.5, "mean@4": 0.5,
        "maj@1": 0.5, "maj@2": 0.75, "maj@4": 1.0, "reward": 0.25, "response_length_mean": 2.5,
        "finished_fraction": 0.75,
    }  # fmt: skip


def test_reward_components_are_reported_separately():
    rows = [row("7", True) | {"reward_values": {"model": value, "format": 1.0}} for value in (-1.0, 4.0)]
    found = prompt_metrics(rows, ())
    assert (found["reward/model"], found["reward/format"]) == (1.5, 1.0)
    rows[0]["reward_values"]["model"] = None  # the term abstains
    assert prompt_metrics(rows, ())["reward/model"] == 4.0


def test_without_answers_there_is_no_majority():
    """As with a verifier that names none; a prompt without answers among others counts as wrong."""
    silent, speaking = (prompt_metrics([row(answer, True), row(answer, True)], (2,)) for answer in (None, "7"))
    assert "maj@2" not in silent and silent["pass@2"] == 1
    assert "maj@2" not in mean_metrics([silent, silent])
    for prompts in ([silent, speaking], [speaking, silent]):
        assert mean_metrics(prompts)["maj@2"] == 0.5


def test_of_fewer_responses_than_k_all_count():
    """Episodes whose environment failed have no row here."""
    found = prompt_metrics([row("7", True), row("8", False)], (1, 4))
    assert (found["pass@4"], found["mean@4"], found["maj@4"]) == (1.0, 0.5, 0.5)


class Prompts(list):
    """Stands where a set of prompts is."""

    def response_limit(self, index: int) -> None:
        """No file has its own."""


def evaluated(rows: list[dict], tasks: list[str], monkeypatch) -> dict[str, float]:
    """Metrics of two responses to a prompt of each task."""
    alone = types.SimpleNamespace(gather=lambda items: [items])
    prompts = Prompts(types.SimpleNamespace(task=task) for task in tasks)
    settings = Settings(eval_responses=2, eval_temperature=1.0)
    tokens = Ragged.of_rows([[1]] * len(tasks))
    evaluator = Evaluator(settings, alone, None, None, prompts, tokens, Timers())
    numbered = [row | {"sequence": number} for number, row in enumerate(rows)]
    by_prompt = itertools.groupby(numbered, lambda row: row["sequence"] // 2)
    monkeypatch.setattr(evaluator, "_scored_rows", lambda: by_prompt)
    return evaluator.evaluate()


def test_failed_episodes_are_left_out(monkeypatch):
    failed, right, wrong = {"failed": True, "sequence": 0}, row("7", True), row("8", False)
    found = evaluated([right, failed, failed, failed, wrong, right], ["a", "b", "c"], monkeypatch)
    assert (found["eval/accuracy"], found["eval/a/accuracy"], found["eval/c/accuracy"]) == (0.75, 1.0, 0.5)
    assert found["eval/pass@2"] == 1.0 and not any(name.startswith("eval/b/") for name in found)
    assert evaluated([failed] * 4, ["a", "b"], monkeypatch) == {"eval/accuracy": 0.0}


def test_means_do_not_depend_on_the_order_of_prompts():
    prompts = [{"accuracy": 1e16}, {"accuracy": 1.0}, {"accuracy": -1e16}]
    assert mean_metrics(prompts) == mean_metrics(prompts[::-1]) == {"accuracy": 1 / 3}


@pytest.mark.parametrize("given, responses, expected", [
    (None, 1, ()), ("1", 1, (1,)), (None, 8, (1, 8)), ("4", 8, (4,)), ("8,1,4,4", 8, (1, 4, 8)),
])  # fmt: skip
def test_attempts(given, responses, expected):
    assert eval_ks(Settings(eval_k=given, eval_responses=responses)) == expected


def test_tasks_are_reported_where_there_are_several(tmp_path):
    rows = [json.loads(line) for line in (inputs() / "heldout.jsonl").read_text().splitlines()][:4]
    whole = ["accuracy", "finished_fraction", "response_length_mean", "reward"]
    for case, (tasks, expected) in enumerate([
        ((None, None, None, None), []), (("sum",) * 4, []), (("sum", "sum", None, "sum"), ["sum"]),
        (("sum", "carry", "sum", "a/b"), ["a/b", "carry", "sum"]),
    ]):  # fmt: skip
        lines = [row | {"task": task} for row, task in zip(rows, tasks, strict=True)]
        prompts = write_lines(tmp_path / f"{case}.jsonl", lines)
        run_evaluate(evaluate_argv(tmp_path, prompts=prompts))
        found = json.loads((tmp_path / "evaluation.json").read_text())["metrics"]
        assert sorted(found) == sorted(f"eval/{n}" for n in [*whole, *(f"{t}/{n}" for t in expected for n in whole)])


@pytest.mark.parametrize("tasks, problem", [
    (["Counting & Probability", "Precalculus"], None),  # subjects of MATH
    (["a\nb"], None),  # of one task there are no metrics of its own
    (["a\nb", "math"], r"task 'a\nb': it names metrics; allowed are 1 to 100 printable characters"),
    (["math", "../../x"], "task '../../x': it names metrics"),
    (["math", None, "t" * 101], "'tttt"),
    ([f"t{i}" for i in range(257)], "257 tasks, of which each has metrics of its own; allowed are 256"),
])  # fmt: skip
def test_tasks_name_metrics(tasks, problem, tmp_path):
    rows = [{"prompt": "1+1=", "answer": "2", **({"task": task} if task else {})} for task in tasks]
    sets = {EVAL_PROMPTS: load_prompts(str(write_lines(tmp_path / "eval.jsonl", rows)), "--eval-prompts")}
    if problem is None:
        check_names(sets, 1000)
    else:
        with pytest.raises(UsageError) as caught:
            check_names(sets, 1000)
        assert problem in str(caught.value) and str(caught.value).isprintable()
        check_names(sets, 1)
