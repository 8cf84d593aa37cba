"""What a verifier gets and gives, and the wrapper that checks it."""

import math
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Callable


@dataclass(frozen=True)
class Sample:
    """One response to score. `finished`: it ended with EOS, rather than at the length limit."""

    prompt: str
    response: str
    answer: str | None = None
    metadata: dict[str, Any] | None = None
    finished: bool = True


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


def whole_response(sample: Sample) -> str | None:
    """The answer of a response that is nothing but its answer; None where that is empty or the length limit cut it."""
    return sample.response.strip() or None if sample.finished else None


class Reward:
    """A verifier under its name, its results checked.

    The verifier maps a Sample to a Score, or to a plain number x: short for Score(x, correct=x >= 1), the answer being
    the whole response, if that is finished.
    """

    def __init__(self, name: str, verifier: Callable[[Sample], Score | Real]):
        self.name = name
        self._verifier = verifier

    def __call__(self, sample: Sample) -> Score:
        """Score one sample; RuntimeError naming verifier and prompt if it raises or gives no finite number."""
        try:
            result = self._verifier(sample)
        except Exception as error:
            raise RuntimeError(f"{self._label(sample)}: {type(error).__name__}: {error}") from error
        if isinstance(result, Real):
            result = Score(float(result), float(result) >= 1.0, extracted=whole_response(sample))
        if not isinstance(result, Score):
            raise RuntimeError(f"{self._label(sample)}: gave {type(result).__name__}, not a Score or a number")
        for name, value in [("reward", result.reward), *result.parts.items()]:
            if not isinstance(value, Real) or not math.isfinite(value):
                raise RuntimeError(f"{self._label(sample)}: {name} is {value!r}, not a finite number")
        if result.parts and not math.isclose(sum(result.parts.values()), result.reward, rel_tol=1e-6, abs_tol=1e-6):
            raise RuntimeError(f"{self._label(sample)}: parts {result.parts} do not add up to {result.reward}")
        if not isinstance(result.extracted, str | None):
            raise RuntimeError(f"{self._label(sample)}: extracted is {result.extracted!r}, neither text nor None")
        parts = {name: float(value) for name, value in result.parts.items()}
        return Score(float(result.reward), bool(result.correct), parts, result.extracted)

    def _label(self, sample: Sample) -> str:
        shown = sample.prompt if len(sample.prompt) <= 80 else sample.prompt[:77] + "..."
        return f"reward {self.name} on prompt {shown!r}"
