"""Verifiers of a response's text: exact match, a regular expression, format, length. Cut responses score 0."""

import re
from collections.abc import Callable
from typing import Any

from megarl.data.prompts import PromptSet
from megarl.errors import UsageError
from megarl.rewards.base import Sample, Score, whole_response


def exact_match(sample: Sample) -> Score:
    """1 if the response equals the answer, white space around both ignored; else 0."""
    if sample.answer is None:
        raise ValueError("exact-match needs an answer")
    correct = sample.finished and sample.response.strip() == sample.answer.strip()
    return Score(float(correct), correct, {"exact_match": float(correct)}, whole_response(sample))


def check_answers(name: str, prompts: PromptSet):
    """UsageError for the first line without an answer, which the verifier `name` needs."""
    for prompt in prompts:
        if prompt.answer is None or not prompt.answer.strip():
            raise UsageError(f"{prompts.where(prompt.index)}: --reward {name} needs an answer on each line")


def check_metadata(name: str, prompts: PromptSet, read: Callable[[dict[str, Any] | None], object]):
    """UsageError for the first line whose metadata the verifier `name` cannot `read` (it raises ValueError)."""
    for prompt in prompts:
        try:
            read(prompt.metadata)
        except ValueError as error:
            raise UsageError(f"{prompts.where(prompt.index)}: --reward {name}: {error}") from None


def regex(pattern: str) -> Callable[[Sample], Score]:
    """A verifier: 1 if `pattern` is found in the response and, where the line has an answer, says that answer.

    What it says is its first group, or all of the match if it has no group or that group took no part; white space
    around is ignored. UsageError if `pattern` is no regular expression.
    """
    expression = _compiled("--reward-pattern", pattern)

    def verify(sample: Sample) -> Score:
        found = expression.search(sample.response) if sample.finished else None
        if found is None:
            return Score(0.0, False, {"regex": 0.0})
        group = found[1] if expression.groups else None
        text = (found[0] if group is None else group).strip()
        correct = sample.answer is None or text == sample.answer.strip()
        return Score(float(correct), correct, {"regex": float(correct)}, text or None)

    return verify


def format_match(pattern: str) -> Callable[[Sample], Score]:
    """A verifier: 1 if `pattern` matches the whole response; `.` stands for line ends, too. UsageError as `regex`."""
    expression = _compiled("--reward-format", pattern, re.DOTALL)

    def verify(sample: Sample) -> Score:
        correct = sample.finished and expression.fullmatch(sample.response) is not None
        return Score(float(correct), correct, {"format": float(correct)})

    return verify


def length(target: int) -> Callable[[Sample], Score]:
    """A verifier: 1 for a response of up to `target` tokens, then falling in a line to 0 at twice as many.

    A cliff at the target would tell two over-long responses of a group apart by nothing, so nothing would make them
    shorter; below the target there is nothing to win by writing even less.
    """

    def verify(sample: Sample) -> Score:
        reward = min(1.0, max(0.0, 2.0 - sample.tokens / target)) if sample.finished else 0.0
        return Score(reward, reward >= 1.0, {"length": reward})

    return verify


def answer_text(response: str) -> str:
    """What is inside the last `<answer>...</answer>` of a response, or all of it if there is none; stripped."""
    head, closed, _ = response.rpartition("</answer>")
    _, opened, inner = head.rpartition("<answer>")
    return (inner if closed and opened else response).strip()


def _compiled(flag: str, pattern: str, how: int = 0) -> re.Pattern[str]:
    try:
        return re.compile(pattern, how)
    except (re.error, OverflowError, RecursionError) as error:
        raise UsageError(f"{flag} {pattern}: not a regular expression: {error}") from None
