"""Every task of reasoning_gym: its own scores for harmless answers, those of a wrong answer for hostile ones."""

import ast
import copy
import importlib
import inspect
import json
import re
from pathlib import Path

import pytest
from reasoning_gym.factory import DATASETS, create_dataset

from megarl.rewards.base import Sample
from megarl.rewards.tasks import EVALUATORS, EXPRESSIONS, LITERALS, evaluates, harmless, make_safe, reasoning_gym
from tests.helpers.tiers import by_default

PLAIN = ["", "0", "no idea", "[[0, 1]]", "{'a': 1", "None"]
MARK = Path("/tmp/megarl-test-of-hostile-answers")
# The first lines read or change what the scorers hold; the others run code, or never end.
HOSTILE = [
    "oracle_answer", "entry['answer']", "[valid_solutions][0][0]", "entry['metadata']['valid_answers'].append('x')",
    "[row.split() for row in oracle_answer.split('\\n')]", "__import__('sys')._getframe(1).f_locals['entry']['answer']",
    f"__import__('os').system('touch {MARK}')", f"__import__('pathlib').Path('{MARK}').touch()",
    f"().__class__.__base__.__subclasses__() and open('{MARK}', 'w')", f"exec('import os; os.mkdir({str(MARK)!r})')",
    f"S('__import__(\"os\").mkdir(\"{MARK}\")')", "lambda: 24", "9**9**9", "factorial(9**9)", "9!!!!!!!!",
    "9**(9*9*99)**9", "[" * 100_000, "(" * 10_000 + ")" * 10_000, "'{:>1000000000}'.format(1)", "\x00\ud800\u202e",
]  # fmt: skip


def entry_of(task):
    """One entry as it is read from a prompt file, and the package's own scorer."""
    dataset = create_dataset(task, size=1, seed=5)
    return json.loads(json.dumps(dataset[0], default=str)), dataset.score_answer


def score(entry, response, seconds=60.0):
    return reasoning_gym(seconds)(Sample("q", f"<answer>{response}</answer>", entry["answer"], entry["metadata"]))


def own(scorer, entry, answer):
    """What the package says; 0 where it raises."""
    try:
        return scorer(answer.strip(), copy.deepcopy(entry))
    except Exception:
        return 0.0


TASKS = sorted(set(DATASETS) - {"composite"})  # which only mixes others
EVALUATING = LITERALS | EXPRESSIONS


def check(task, others, hostile):
    entry, scorer = entry_of(task)
    before = copy.deepcopy(entry)
    answer = str(entry["answer"])
    for response in [answer, *others]:
        found = score(entry, response)
        assert found.reward == own(scorer, entry, response), response
        assert found.correct == (found.reward == 1.0)
    wrong = own(scorer, entry, "no idea")
    for response in hostile:
        most = wrong if task in EVALUATING else own(scorer, entry, response)  # by its letters
        assert score(entry, response, 5.0).reward <= most, response
        assert not MARK.exists()
    assert entry == before


@pytest.mark.parametrize("task", by_default(TASKS, {*TASKS[::5], *EVALUATING}))
def test_a_task_has_the_package_s_own_scores(task):
    check(task, ["no idea"], HOSTILE[6:7])


@pytest.mark.parametrize("task", sorted(EVALUATING))
def test_no_response_is_evaluated(task):
    check(task, ["[[0, 1]]"], HOSTILE[:-4])


@pytest.mark.long
@pytest.mark.parametrize("task", TASKS)
def test_all_responses_of_all_tasks(task):
    answer = str(entry_of(task)[0]["answer"])
    check(task, [answer + " or not", answer[: len(answer) // 2], *PLAIN], HOSTILE)


def test_hostile_literals_and_sums_end():
    """Deep nesting, long text and characters that are none, for one task of each kind."""
    for task in ("n_queens", "countdown", "chain_sum"):
        check(task, [], HOSTILE[-4:])


def test_a_list_in_place_of_a_board_gets_its_part():
    """As in the package: half the score, for a list of the board's lines."""
    entry, scorer = entry_of("n_queens")
    board = str([line.split() for line in entry["answer"].split("\n")])
    assert score(entry, board).reward == own(scorer, entry, board) == 0.5


def test_an_unevaluated_integral_is_no_answer():
    entry, scorer = entry_of("simple_integration")
    restated = f"Integral({entry['metadata']['integrand']}, {entry['metadata']['variable']})"
    assert (own(scorer, entry, restated), score(entry, restated).reward) == (1.0, 0.0)


@pytest.mark.parametrize("text, is_one", [
    ("(3 + 5) * 4 - 2**3", True), ("x**2/2 + sin(3*x)/3 + C", True), ("-.5*x1^2 + 1.5e-3, 7!", True), ("x_2", True),
    ("8 // 3 % 2", True), ("eval(3)", False), ("x.diff", False), ("[1]", False), ("'a'", False), ("a=1", False),
    ("lambda: 1", False), ("__import__", False), ("exec(x)", False), ("2**99999", False), ("2**(9)**9", False),
    ("9**(9*9)**9", False), ("99999!", False), ("3!!", False), ("1e999", False), ("x if y else z", False),
    ("9" * 101, False), ("x+" * 6000 + "x", False), ("x\x00", False), ("²", False), ("open(1)", False),
    ("1 < 2", False),
])  # fmt: skip
def test_expressions_are_numbers_names_and_arithmetic(text, is_one):
    assert harmless("countdown", text, None) == (text if is_one else "?")
    assert harmless("countdown", text, text) == harmless("chain_sum", text, None) == text


def test_every_scorer_that_evaluates_text_is_known():
    """In the installed version: the scorers themselves, and all functions of the package that scorers could call."""
    classes = {task: dataset for task, (dataset, _) in DATASETS.items()}
    assert {task for task, dataset in classes.items() if evaluates(dataset.score_answer)} == EVALUATING
    root = Path(inspect.getfile(importlib.import_module("reasoning_gym"))).parent
    found = set()
    called = re.compile(rf"(?<![.\w])(?:{'|'.join(EVALUATORS)})\(")
    texts = {path: path.read_text() for path in root.rglob("*.py")}
    for path in (path for path, text in texts.items() if called.search(text)):
        for node in ast.walk(ast.parse(texts[path])):
            if isinstance(node, ast.FunctionDef) and node.name != "score_answer":
                calls = [each.func for each in ast.walk(node) if isinstance(each, ast.Call)]
                if any(getattr(call, "id", None) in EVALUATORS for call in calls):
                    found.add(f"{path.stem}.{node.name}")
    # Generators, a parser of its own, and one scorer's evaluation of its own problem.
    assert found == {
        "basic_arithmetic.eval_floordiv", "bitwise_arithmetic.generate_problem", "bitwise_arithmetic.verify_solution",
        "codeio._generate_io_pair", "generators_00_49.generate_32", "generators_00_49.generate_example",
        "generators_50_99.generate_69", "generators_50_99.generate_from_variables",
        "propositional_logic.from_string", "propositional_logic.parse_expr",
    }  # fmt: skip


def test_a_scorer_of_an_unknown_version_that_evaluates_text_is_refused():
    with pytest.raises(ValueError, match="its scorer evaluates text"):
        make_safe("new_task", DATASETS["countdown"][0].score_answer)
