"""What a verifier gets and gives, and the wrapper that checks it."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Real
from typing import Any


@dataclass(frozen=True)
class Sample:
    """One response to score. `finished`: it ended with EOS, rather than at the length limit.

    `messages` is the conversation that led to it where the prompt is one; `tokens` counts those of the response.
    """

    prompt: str
    response: str
    answer: str | None = None
    metadata: dict[str, Any] | None = None
    finished: bool = True
    messages: list[dict[str, Any]] | None = None
    tokens: int = 0


@dataclass(frozen=True)
class Score:
    """`reward` is what the policy is trained on, `correct` what accuracy counts.

    `parts` are named shares of the reward, for the log; where there are any, they add up to it. `extracted` is the
    answer that the response gives, right or wrong, for majority votes; None: it gives none and votes for nothing.
    """

    reward: float
    correct: bool
    parts: dict[str, float] = field(default_factory=dict)
    extracted: str | None = None


@dataclass(frozen=True)
class Job:
    """One call of the verifier `name`: for one sample, or for all where it is batched; it may take `seconds`."""

    name: str
    samples: list[Sample]
    seconds: float


def batched(function: Callable) -> Callable:
    """Marks a plug-in that takes a list of samples, all of one step, and gives a list of as many results."""
    function.batched = True
    return function


def whole_response(sample: Sample) -> str | None:
    """The answer of a response that is nothing but its answer; None where that is empty or the length limit cut it."""
    return sample.response.strip() or None if sample.finished else None


def failure(name: str, sample: Sample, problem: object) -> str:
    """The line that tells why the verifier `name` has no score for a sample; an exception is named with its type."""
    if isinstance(problem, BaseException):
        problem = f"{type(problem).__name__}: {problem}"
    shown = sample.prompt if len(sample.prompt) <= 80 else sample.prompt[:77] + "..."
    return f"reward {name} on prompt {shown!r}: {problem}"


class Verifier:
    """A verifier under its name, its results checked.

    The verifier maps a Sample to a Score, or to a plain number x: short for Score(x, correct=x >= 1), the answer being
    the whole response, if that is finished. One marked `batched` maps a list of samples to a list of these.
    """

    def __init__(self, name: str, verifier: Callable):
        self.name = name
        self.batched = bool(getattr(verifier, "batched", False))
        self._verifier = verifier

    def __call__(self, sample: Sample) -> Score:
        """Score one sample; RuntimeError naming verifier and prompt if it raises or gives no finite number."""
        try:
            result = self._verifier([sample])[0] if self.batched else self._verifier(sample)
        except (Exception, SystemExit) as error:
            raise RuntimeError(failure(self.name, sample, error)) from error
        return self._checked(sample, result)

    def outcomes(self, samples: list[Sample]) -> list[Score | str]:
        """A Score for each sample, or the reason why there is none; a batched verifier that raises fails them all."""
        if not self.batched:
            return [self._outcome(self, sample) for sample in samples]
        try:
            results = list(self._verifier(samples))
            if len(results) != len(samples):
                raise ValueError(f"gave {len(results)} results for {len(samples)} samples")
        except (Exception, SystemExit) as error:
            return [failure(self.name, sample, error) for sample in samples]
        return [self._outcome(self._checked, *item) for item in zip(samples, results, strict=True)]

    def _outcome(self, score: Callable[..., Score], *inputs) -> Score | str:
        try:
            return score(*inputs)
        except RuntimeError as error:
            return str(error)

    def _checked(self, sample: Sample, result: object) -> Score:
        if isinstance(result, Real):
            result = Score(float(result), float(result) >= 1.0, extracted=whole_response(sample))
        problem = _problem(result)
        if problem:
            raise RuntimeError(failure(self.name, sample, problem))
        parts = {str(name): float(value) for name, value in result.parts.items()}
        return Score(float(result.reward), bool(result.correct), parts, result.extracted)


def _problem(result: object) -> str | None:
    """What is wrong with a verifier's result."""
    if not isinstance(result, Score):
        return f"gave {type(result).__name__}, not a Score or a number"
    if not isinstance(result.parts, dict):
        return f"parts is {result.parts!r}, not a dict"
    for name, value in [("reward", result.reward), *result.parts.items()]:
        if not isinstance(value, Real) or not math.isfinite(value):
            return f"{name} is {value!r}, not a finite number"
    if result.parts and not math.isclose(sum(result.parts.values()), result.reward, rel_tol=1e-6, abs_tol=1e-6):
        return f"parts {result.parts} do not add up to {result.reward}"
    if not isinstance(result.extracted, str | None):
        return f"extracted is {result.extracted!r}, neither text nor None"
    return None
