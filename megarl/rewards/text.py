"""Text verifiers: exact match, regular expression, format, length. Responses cut by the length limit score 0."""

import re
from collections.abc import Callable
from typing import Any

from megarl.data.prompts import PromptSet
from megarl.errors import UsageError
from megarl.rewards.base import BuiltIn, Sample, Score, whole_response


def exact_match(sample: Sample) -> Score:
    """1 if the response equals the answer, ignoring white space around both; else 0."""
    if sample.answer is None:
        raise ValueError("exact-match needs an answer")
    correct = sample.finished and sample.response.strip() == sample.answer.strip()
    return Score(float(correct), correct, {"exact_match": float(correct)}, extracted=whole_response(sample))


def check_answers(name: str, prompts: PromptSet):
    """UsageError for the first line without an answer, which the verifier `name` needs."""
    for prompt in prompts:
        if prompt.answer is None or not prompt.answer.strip():
            raise UsageError(f"{prompts.where(prompt.index)}: --reward {name} needs an answer on each line")


def check_metadata(name: str, prompts: PromptSet, read: Callable[[dict[str, Any] | None], object]):
    """UsageError for the first line on whose metadata `read`, of the verifier `name`, raises ValueError."""
    for prompt in prompts:
        try:
            read(prompt.metadata)
        except ValueError as error:
            raise UsageError(f"{prompts.where(prompt.index)}: --reward {name}: {error}") from None


def regex(pattern: str) -> Callable[[Sample], Score]:
    """A verifier: 1 if `pattern` occurs in the response and its text equals the reference answer, if there is one. Its
    text is the first group, or the whole match if it has no group or the group did not take part, without white space
    around. UsageError if `pattern` is not a regular expression.
    """
    expression = _compiled("--reward-pattern", pattern)

    def verify(sample: Sample) -> Score:
        match = expression.search(sample.response) if sample.finished else None
        if match is None:
            return Score(0.0, False, {"regex": 0.0})
        group = match[1] if expression.groups else None
        text = (match[0] if group is None else group).strip()
        correct = sample.answer is None or text == sample.answer.strip()
        return Score(float(correct), correct, {"regex": float(correct)}, extracted=text or None)

    return verify


def format_match(pattern: str) -> Callable[[Sample], Score]:
    """A verifier: 1 if `pattern` matches the whole response; `.` also matches line ends. UsageError as for `regex`."""
    expression = _compiled("--reward-format", pattern, re.DOTALL)

    def verify(sample: Sample) -> Score:
        correct = sample.finished and expression.fullmatch(sample.response) is not None
        return Score(float(correct), correct, {"format": float(correct)})

    return verify


def length(target: int) -> Callable[[Sample], Score]:
    """A verifier: 1 for a response of up to `target` tokens, then falling linearly to 0 at twice as many. With a step
    at the target, two over-long responses of a group would score the same, so nothing would shorten them. Below the
    target, a shorter response gains nothing.
    """

    def verify(sample: Sample) -> Score:
        reward = min(1.0, max(0.0, 2.0 - sample.tokens / target)) if sample.finished else 0.0
        return Score(reward, reward >= 1.0, {"length": reward})

    return verify


def answer_text(response: str) -> str:
    """The text in the last `<answer>...</answer>` of a response, or the whole response without one; stripped."""
    head, closed, _ = response.rpartition("</answer>")
    _, opened, inner = head.rpartition("<answer>")
    return (inner if closed and opened else response).strip()


def _compiled(flag: str, pattern: str, flags: int = 0) -> re.Pattern[str]:
    try:
        return re.compile(pattern, flags)
    except (re.error, OverflowError, RecursionError) as error:
        raise UsageError(f"{flag} {pattern}: not a regular expression: {error}") from None


EXACT_MATCH = BuiltIn(lambda _: exact_match, lambda prompts: check_answers("exact-match", prompts), limited=False)
REGEX = BuiltIn(lambda options: regex(options.pattern), wrong=Score(0.0, False, {"regex": 0.0}))
FORMAT = BuiltIn(lambda options: format_match(options.format), wrong=Score(0.0, False, {"format": 0.0}))
LENGTH = BuiltIn(lambda options: length(options.length), limited=False)
