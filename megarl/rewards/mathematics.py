"""The verifier `math-verify`: whether two mathematical expressions mean the same, by the package math-verify."""

import functools
import importlib.util
import logging
import re
from typing import Any

from megarl.data.prompts import PromptSet
from megarl.errors import UsageError
from megarl.rewards import guard
from megarl.rewards.base import Sample, Score
from megarl.rewards.text import answer_text, check_answers

_MARKED = re.compile(r"\$|\\\(|\\\[|\\boxed")  # what sets mathematics apart from the text around it
_WORD = re.compile(r"(?<![\\A-Za-z])(?!sqrt\b)[A-Za-z]{2,}")  # \alpha and x are none


def math_verify(sample: Sample) -> Score:
    """1 if the response's answer equals the line's, as `1/2`, `0.5` and `\\frac{1}{2}` do; else 0.

    The answer is the last `\\boxed{...}`, or a formula, or the last number, of the last `<answer>...</answer>` if there
    is one, else of the whole response. `extracted` is its canonical form, the same for `0.5` and `1/2`. A response that
    was cut by the length limit scores 0. Raises ValueError for an answer of the line that cannot be read.
    """
    from math_verify import verify

    reference = parsed(sample.answer or "")
    if not reference:
        raise ValueError(f"math-verify cannot read the answer {sample.answer!r}")
    found = parsed(answer_text(sample.response)) if sample.finished else []
    # The package's own time-outs are alarms, which would undo the one that stops this verifier.
    correct = bool(found) and verify(reference, found, timeout_seconds=None)
    return Score(float(correct), correct, {"math_verify": float(correct)}, _canonical(found))


@functools.lru_cache(maxsize=4096)
def parsed(text: str) -> list[Any]:
    """The expression in a text: a sympy object, then its source; empty if there is none. Imports sympy."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    _quiet()
    latex = LatexExtractionConfig(boxed_match_priority=0)
    # A text of mathematics alone is read as LaTeX, in which 2\pi is one expression; among words it is the number 2.
    # Words are never read so: as products of letters, Paris and pairs would be equal.
    alone = not (_MARKED.search(text) or _WORD.search(text) or "\n" in text.strip())
    for source in [f"${text}$", text] if alone else [text]:
        found = parse(_last_box(source), [latex, ExprExtractionConfig()], parsing_timeout=None)
        if found and not isinstance(found[0], str):
            return found
    return []


def check_mathematics(prompts: PromptSet):
    """UsageError for the first line without an answer, or where the package is missing; does not import it."""
    if importlib.util.find_spec("math_verify") is None:
        raise UsageError("--reward math-verify: the package math-verify is not installed")
    check_answers("math-verify", prompts)


def load_mathematics(prompts: PromptSet, seconds: float):
    """UsageError for the first line whose answer cannot be read, within `seconds` where an alarm can be set."""
    for prompt in prompts:
        try:
            found = guard.call(parsed, prompt.answer, seconds)
        except TimeoutError as error:
            found, problem = [], f": {error}"
        else:
            problem = ""
        if not found:
            where = prompts.where(prompt.index)
            raise UsageError(
                f"{where}: --reward math-verify: cannot read the answer {prompt.answer!r}{problem}; allowed: a number "
                "or LaTeX"
            )


def _last_box(text: str) -> str:
    """From the last `\\boxed` on: the package makes one set of several boxes, but the last word counts."""
    return text[max(text.rfind("\\boxed"), 0) :]


def _canonical(found: list[Any]) -> str | None:
    if not found:
        return None
    import sympy

    value = found[0]
    try:
        return str(sympy.nsimplify(value.doit(), rational=True) if value.is_number else value)
    except Exception:
        return str(found[-1])  # as it was written: numbers of thousands of digits, say, have no text


@functools.cache
def _quiet():
    """The package warns that its time-outs are off; `guard` has its own."""
    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)
