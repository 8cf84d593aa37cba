"""Metrics of an evaluation: of a prompt, and means over prompts and tasks."""

import itertools
import json
import math
import random
import types
from collections import Counter
from fractions import Fraction

import pytest

from megarl.checkpoint.resume import EVAL_PROMPTS
from megarl.data.prompts import load_prompts
from megarl.data.ragged import Ragged
from megarl.errors import UsageError
from megarl.flags.settings import Settings
from megarl.observe.timers import Timers
from megarl.trainers.evaluator import (
    Evaluator,
    check_names,
    eval_ks,
    maj_at_k,
    majority,
    mean_at_k,
    mean_metrics,
    pass_at_k,
    prompt_metrics,
)
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


# -- pass@k, mean@k and maj@k --------------------------------------------------------------------------------------


CASES = [(n, c, k) for n in range(1, 10) for c in range(n + 1) for k in range(1, n + 1)]  # 330


def test_pass_at_k_is_the_share_of_subsets_with_a_correct_response():
    assert len(CASES) > 300
    for n, c, k in CASES:
        subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
        assert pass_at_k(n, c, k) == float(Fraction(sum(map(any, subsets)), len(subsets))), (n, c, k)


def test_pass_at_k_in_closed_form():
    generator = random.Random(0)
    for _ in range(300):
        n = generator.randint(1, 2000)
        c, k = generator.randint(0, n), generator.randint(1, n)
        assert pass_at_k(n, c, 1) == c / n
        assert pass_at_k(n, c, n) == float(c > 0)
        assert pass_at_k(n, 1, k) == k / n
        assert pass_at_k(n, 0, k) == 0 and pass_at_k(n, n, k) == 1
        product = math.prod(1 - k / i for i in range(n - c + 1, n + 1)) if n - c >= k else 0.0
        assert pass_at_k(n, c, k) == pytest.approx(1 - product, rel=0, abs=1e-12)


def test_pass_at_k_rises_with_k_and_with_c():
    for n, c, k in CASES:
        if k < n:
            assert pass_at_k(n, c, k + 1) >= pass_at_k(n, c, k)
        if c < n:
            assert pass_at_k(n, c + 1, k) >= pass_at_k(n, c, k)


def test_pass_at_k_is_unbiased():
    """Over all outcomes of n draws with success p the mean is 1 − (1 − p)^k, also at k = n."""
    for n, k, p in itertools.product((1, 2, 5, 8), range(1, 9), (0.1, 0.37, 0.9)):
        if k <= n:
            weights = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
            mean = math.fsum(w * pass_at_k(n, c, k) for c, w in enumerate(weights))
            assert mean == pytest.approx(1 - (1 - p) ** k, rel=0, abs=1e-14)


def test_mean_at_k_counts_the_voting_responses():
    verdicts = [True, False, True, True, False, False, True]
    assert [mean_at_k(verdicts, k) for k in range(1, 8)] == [4 / 7, 3 / 6, 3 / 6, 3 / 4, 3 / 5, 3 / 6, 4 / 7]


def elected(answers, correct) -> Fraction:
    """Expected correctness of the winner, by counting every way to break the tie and to pick one of its voters."""
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return Fraction(0)
    winners = [answer for answer in votes if votes[answer] == max(votes.values())]
    shares = [[good for a, good in zip(answers, correct, strict=True) if a == winner] for winner in winners]
    return sum(Fraction(sum(share), len(share)) for share in shares) / len(winners)


def test_majority_equals_the_count_over_all_draws():
    for length in range(1, 6):
        for answers in itertools.product((None, "a", "b", "c"), repeat=length):
            verdicts = [answer == "a" for answer in answers]
            assert majority(answers, verdicts) == pytest.approx(float(elected(answers, verdicts)), rel=1e-15)
    generator = random.Random(1)
    for _ in range(300):  # verdicts that differ among responses with one answer
        answers = [generator.choice([None, "a", "b", "c", "d"]) for _ in range(generator.randint(1, 12))]
        verdicts = [answer is not None and generator.random() < 0.5 for answer in answers]
        assert majority(answers, verdicts) == pytest.approx(float(elected(answers, verdicts)), rel=1e-15)


@pytest.mark.parametrize("answers, right, expected", [
    ("aab", "a", 1.0), ("abb", "a", 0.0), ("ab", "a", 0.5), ("abc", "a", 1 / 3), ("aabbc", "a", 0.5),
    ("a--", "a", 1.0), ("---", "a", 0.0), ("-bb", "a", 0.0), ("-ab", "b", 0.5), ("aabb", "c", 0.0),
])  # fmt: skip
def test_majorities_ties_and_abstentions(answers, right, expected):
    given = [None if answer == "-" else answer for answer in answers]
    assert majority(given, [answer == right for answer in given]) == expected


def test_maj_at_k_is_the_mean_over_runs_that_share_nothing():
    answers, verdicts = list("abaabbaac"), [c == "a" for c in "abaabbaac"]
    assert maj_at_k(answers, verdicts, 9) == majority(answers, verdicts) == 1.0
    assert maj_at_k(answers, verdicts, 3) == (1 + 0 + 1) / 3
    assert maj_at_k(answers, verdicts, 4) == (1 + 0.5) / 2  # the last one votes in no run
    assert maj_at_k(answers, verdicts, 5) == 1.0
    assert maj_at_k(answers, verdicts, 1) == mean_at_k(verdicts, 1) == 5 / 9
    assert maj_at_k(answers, verdicts, 2) == (0.5 + 1 + 0 + 1) / 4


@pytest.mark.parametrize("n, k", [(4, 1), (4, 2), (5, 2), (4, 3), (4, 4)])
def test_maj_at_k_and_mean_at_k_are_unbiased(n, k):
    """Averaged over all outcomes of n draws, the estimates equal the expectation over k draws."""
    chances = {"a": 0.45, "b": 0.35, "c": 0.15, None: 0.05}

    def expected(draws, function):
        outcomes = itertools.product(chances, repeat=draws)
        return math.fsum(
            math.prod(chances[a] for a in answers) * function(answers, [a == "a" for a in answers])
            for answers in outcomes
        )

    found = expected(n, lambda answers, verdicts: maj_at_k(answers, verdicts, k))
    assert found == pytest.approx(expected(k, majority), rel=0, abs=1e-14)
    assert expected(n, lambda _, verdicts: mean_at_k(verdicts, k)) == pytest.approx(0.45, rel=0, abs=1e-14)
