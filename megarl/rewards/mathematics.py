"""The verifier `math-verify`: whether two mathematical expressions are equal, by the package math-verify.

Each response has a process of its own (`isolated`): the package's parser calls sympy's, which evaluates text, and
computes whatever numbers it says.
"""

import functools
import importlib.util
import logging
import re
from typing import Any

from megarl.data.prompts import PromptSet
from megarl.errors import UsageError
from megarl.rewards import guard
from megarl.rewards.base import Sample, Score, ScoringError
from megarl.rewards.isolated import Isolated
from megarl.rewards.text import answer_text, check_answers

_MARKED = re.compile(r"\$|\\\(|\\\[|\\boxed")  # delimiters of mathematics in text
_WORD = re.compile(r"(?<![\\A-Za-z])(?!sqrt\b)[A-Za-z]{2,}")  # \alpha and x are not words
WRONG = Score(0.0, False, {"math_verify": 0.0})


def score_inside(sample: Sample) -> Score:
    """1 if the response's answer equals the reference, as `1/2`, `0.5` and `\\frac{1}{2}` do; else 0.

    The answer is the last `\\boxed{...}`, or a formula, or the last number of the last `<answer>...</answer>`, or of
    the whole response without one. `extracted` is its canonical form, the same for `0.5` and `1/2`. A response cut by
    the length limit scores 0. Raises ValueError for a reference answer that cannot be parsed.
    """
    from math_verify import verify

    reference = parsed(sample.answer or "")
    if not reference:
        raise ValueError(f"math-verify cannot read the answer {sample.answer!r}")
    answer = parsed(answer_text(sample.response)) if sample.finished else []
    # The package's own time-outs are alarms, which would cancel the one that limits this verifier.
    correct = bool(answer) and verify(reference, answer, timeout_seconds=None)
    return Score(float(correct), correct, {"math_verify": float(correct)}, extracted=_canonical(answer))


@functools.lru_cache(maxsize=4096)
def parsed(text: str) -> list[Any]:
    """The expression in a text, as [sympy object, source]; empty if it has none. Imports sympy."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    _quiet()
    latex = LatexExtractionConfig(boxed_match_priority=0)
    # A text without words is parsed as LaTeX, where 2\pi is one expression; among words it is the number 2. Words are
    # never parsed as LaTeX: as products of letters, Paris and pairs would be equal.
    only_mathematics = not (_MARKED.search(text) or _WORD.search(text) or "\n" in text.strip())
    for source in [f"${text}$", text] if only_mathematics else [text]:
        expression = parse(_last_box(source), [latex, ExprExtractionConfig()], parsing_timeout=None)
        if expression and not isinstance(expression[0], str):
            return expression
    return []


def prepare(metadata: dict[str, Any] | None):
    """Nothing to build: answers are parsed with the response."""


def prepared() -> int:
    """Children inherit the same at any time."""
    return 0


def may_share(metadata: dict[str, Any] | None) -> bool:
    """False: every response is parsed."""
    return False


def warm_up():
    """Import the package and what it imports with the first expression."""
    score_inside(Sample("", "\\boxed{\\frac{1}{2}}", "0.5"))


def check_mathematics(prompts: PromptSet):
    """UsageError for the first line without an answer, or if the package is missing; does not import it."""
    if importlib.util.find_spec("math_verify") is None:
        raise UsageError("--reward math-verify: the package math-verify is not installed")
    check_answers("math-verify", prompts)


def load_mathematics(prompts: PromptSet, seconds: float):
    """UsageError for the first line whose answer cannot be parsed within `seconds`, or if responses cannot be."""
    try:
        Isolated("math-verify", seconds).prepare({})
    except ScoringError as error:
        raise UsageError(f"--reward math-verify: {error}") from None
    for prompt in prompts:
        try:
            expression, problem = guard.call(parsed, prompt.answer, seconds), ""
        except TimeoutError as error:
            expression, problem = [], f": {error}"
        if not expression:
            where = prompts.where(prompt.index)
            raise UsageError(
                f"{where}: --reward math-verify: cannot read the answer {prompt.answer!r}{problem}; allowed: a number "
                "or LaTeX"
            )


def _last_box(text: str) -> str:
    """The text from the last `\\boxed` on: the package would make one set of several boxes, but the last one counts."""
    return text[max(text.rfind("\\boxed"), 0) :]


def _canonical(expression: list[Any]) -> str | None:
    """Text of a parsed expression that is the same for equal numbers; None if it is empty."""
    if not expression:
        return None
    import sympy

    value = expression[0]
    try:
        return str(sympy.nsimplify(value.doit(), rational=True) if value.is_number else value)
    except Exception:
        return str(expression[-1])  # the source: sympy cannot print, e.g., numbers of thousands of digits


@functools.cache
def _quiet():
    """Silence the package's warnings that its time-outs are off: `guard` sets its own."""
    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)
