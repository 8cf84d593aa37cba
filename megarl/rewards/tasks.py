"""The verifier `reasoning-gym`: the scorers of the tasks in the package reasoning_gym."""

import ast
import functools
import importlib.util
import inspect
import re
import sys
import textwrap
from collections.abc import Callable
from typing import Any

from megarl.data.prompts import PromptSet
from megarl.errors import UsageError
from megarl.rewards import isolated
from megarl.rewards.base import BuiltIn, Sample, Score, ScoringError
from megarl.rewards.text import answer_text, check_metadata

# Every task scores a right answer exactly 1.0. Partly right ones get less: 0.01 for a wrong but well-formed answer, or
# 0.9999999999999999 for a word spelt backward followed by more letters.
_CORRECT_FROM = 1.0
_NAME = "reasoning-gym"
WRONG = Score(0.0, False, {"reasoning_gym": 0.0})


def reasoning_gym(seconds: float) -> Callable[[Sample], Score]:
    """A verifier: the score, 0 to 1, of the task's own scorer in reasoning_gym; partly right answers get less than 1.

    The task is `metadata["source_dataset"]`. Scores the text in the last `<answer>...</answer>`, or the whole response
    without one. Some scorers raise on text that they cannot parse: that counts as a wrong answer if the same scorer
    accepts the reference answer. A response cut by the length limit scores 0. Every response is scored on a copy of
    the metadata in a confined process (`isolated`), which takes at most `seconds`; it has the process for itself if
    the scorer evaluates text.
    """

    def verify(sample: Sample) -> Score:
        source_dataset(sample.metadata)
        if sample.finished:
            return isolated.score(_NAME, seconds, sample)
        isolated.prepare(_NAME, sample.metadata)
        return WRONG

    return verify


def score_inside(sample: Sample) -> Score:
    """The score of a response; runs confined."""
    entry = {"answer": sample.answer, "metadata": sample.metadata}
    extracted = answer_text(sample.response)
    task = source_dataset(sample.metadata)
    scorer = task_scorer(task)
    try:
        score = float(scorer(harmless(task, extracted, sample.answer), entry))
    except Exception:
        scorer(sample.answer, entry)  # raises if the entry is broken
        score = 0.0
    return Score(score, score >= _CORRECT_FROM, {"reasoning_gym": score}, extracted=extracted or None)


def prepare(metadata: dict[str, Any] | None) -> int | None:
    """Build the scorer for samples with this metadata. The number of scorers; None if this one evaluates responses."""
    task = source_dataset(metadata)
    task_scorer(task)
    return None if task in LITERALS | EXPRESSIONS else task_scorer.cache_info().currsize


def warm_up():
    import reasoning_gym  # noqa: F401


def check_tasks(prompts: PromptSet):
    """UsageError for the first line that does not name its task; does not import reasoning_gym."""
    if importlib.util.find_spec("reasoning_gym") is None:
        raise UsageError("--reward reasoning-gym: the package reasoning_gym is not installed")
    check_metadata("reasoning-gym", prompts, source_dataset)


def load_tasks(prompts: PromptSet):
    """Build the scorer of every task in `prompts`; UsageError for a task that reasoning_gym cannot score."""
    known = set()
    for prompt in prompts:
        task = source_dataset(prompt.metadata)
        if task in known:
            continue
        try:
            isolated.prepare(_NAME, {"source_dataset": task})
        except ScoringError as error:
            where = prompts.where(prompt.index)
            raise UsageError(f"{where}: --reward reasoning-gym: no scorer for task {task!r}: {error}") from None
        known.add(task)


@functools.cache
def task_scorer(task: str) -> Callable[[str | None, dict[str, Any]], float]:
    """The scorer of `task`, cached; raises what reasoning_gym raises (ValueError for an unknown task)."""
    # Imported here, because it takes about a second and 80 MB, and only scoring processes need it.
    from reasoning_gym import get_score_answer_fn

    scorer = get_score_answer_fn(task)
    make_safe(task, scorer)
    return scorer


def source_dataset(metadata: dict[str, Any] | None) -> str:
    """The name of a sample's task; ValueError without one."""
    task = (metadata or {}).get("source_dataset")
    if not isinstance(task, str) or not task:
        raise ValueError("metadata must hold source_dataset, the name of the reasoning_gym task")
    return task


# -- what a response says is not run -------------------------------------------------------------------------------
#
# Several scorers pass the response to `eval` or to sympy's parser, which is an `eval`, too. Beside the expected answer,
# such text could compute or copy it. Here `eval` becomes `ast.literal_eval` for the tasks whose answers may be Python
# lists, and text for sympy must consist of numbers, known names and arithmetic.

# Tasks by what their scorer does with the response. A test checks that these are all in the installed version.
LITERALS = frozenset({"binary_matrix", "n_queens", "number_sorting", "spiral_matrix", "string_insertion"})
EXPRESSIONS = frozenset(
    {"countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"}
)
EVALUATORS = frozenset({"eval", "exec", "compile", "sympify", "parse_expr", "parse_latex", "__import__"})

_UNREADABLE = "?"  # for which each scorer of an expression gives the score of a text that it cannot parse
_MAX_LENGTH = 10_000
_FUNCTIONS = (
    "sin cos tan sec csc cot asin acos atan asec acsc acot sinh cosh tanh asinh acosh atanh exp log ln sqrt root Abs "
    "abs pi erf Ei Si Ci li oo"
)
_NUMBER = r"(?:\d{1,100}(?:\.\d{0,100})?|\.\d{1,100})(?:[eE][+-]?\d{1,2})?"
_TOKEN = re.compile(
    rf"\s+|{_NUMBER}(?![\w.])|(?:[A-Za-z]_?\d{{0,2}}|{'|'.join(_FUNCTIONS.split())})(?!\w)|\*\*|//|[-+*/%^(),!]"
)
# Exponents of four or more digits, powers as exponents, factorials of more than three digits or of expressions:
# numbers that fill the memory. Those that get through are ended by the limits.
_HUGE = re.compile(r"(?:\*\*|\^)[\s(+-]*(?:\d{4,}|[\d.]+[\s)]*(?:\*\*|!)|[^()]*\)\s*(?:\*\*|!))|\d{4,}\s*!|[!)]\s*!")


def harmless(task: str, answer: str, reference: str | None) -> str:
    """The answer, or for a task of expressions a text that its scorer cannot parse, if the answer is no expression.
    `Integral(f(x), x)` is none, which the scorers of integrals would accept: only where it is the reference answer.
    """
    return answer if task not in EXPRESSIONS or answer == reference or _is_expression(answer) else _UNREADABLE


def make_safe(task: str, scorer: Callable):
    """Replace `eval` for a task of literals; ValueError for one whose scorer evaluates text in an unknown way."""
    if task in LITERALS:
        vars(sys.modules[scorer.__module__])["eval"] = ast.literal_eval
    elif task not in EXPRESSIONS and evaluates(scorer):
        raise ValueError("its scorer evaluates text, and this version of megarl does not know how to make that safe")


def evaluates(function: Callable) -> bool:
    """Whether the source of a function has a call that evaluates text."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return any(getattr(call, "id", getattr(call, "attr", None)) in EVALUATORS for call in calls)


def _is_expression(text: str) -> bool:
    if len(text) > _MAX_LENGTH or _HUGE.search(text):
        return False
    end = 0
    while end < len(text):
        token = _TOKEN.match(text, end)
        if token is None:
            return False
        end = token.end()
    return True


REASONING_GYM = BuiltIn(
    lambda options: reasoning_gym(options.timeout),
    check_tasks,
    lambda prompts, _: load_tasks(prompts),
    limited=False,
    threads="workers",
    isolated=True,
)
