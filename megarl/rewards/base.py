"""Inputs and outputs of a verifier, and the wrapper that checks its results."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from megarl import user_results
from megarl.measurements import parts_of, value_of
from megarl.plugins import place_of
from megarl.user_results import shown, shown_error

if TYPE_CHECKING:  # the rows of the table are in modules that read prompts
    from megarl.data.prompts import PromptSet

_SHOWN = 80  # characters of prompt and response in a reason
_LONGEST = 2000  # characters of what went wrong


@dataclass(frozen=True)
class Sample:
    """One response to score. `finished`: it ended with EOS, not at the length limit.

    `messages` is the prompt's conversation, if the prompt is one; `tokens` is the response's length.

    With an environment `response` is what the policy wrote in its last turn: an observation is not an answer of the
    policy. `turns` has a record of each turn: its `text`, the environment's `observation` after it as text (empty
    after the last), and its `reward`. Without an environment the response is the only turn.

    `columns` has all that the prompt's row holds, by the names of its file: `metadata`, and `prompt` and `answer` as
    the file calls them. `images` has the prompt's images in order: `bytes` of the file, `width` and `height`; texts
    have `[image 640×480 sha:12ab34cd]` in their places.
    """

    prompt: str
    response: str
    answer: str | None = None
    metadata: dict[str, Any] | None = None
    finished: bool = True
    messages: list[dict[str, Any]] | None = None
    tokens: int = 0
    turns: list[dict[str, Any]] = field(default_factory=list)
    columns: dict[str, Any] = field(default_factory=dict)
    images: list[dict[str, Any]] = field(default_factory=list)


def only_turn(response: str) -> list[dict[str, Any]]:
    """`Sample.turns` of a response without an environment."""
    return [{"text": response, "observation": "", "reward": 0.0}]


@dataclass(frozen=True)
class Score:
    """`reward` trains the policy; `correct` counts for accuracy.

    `parts` are named reward components for the log; if any are given, they add up to the reward. `extracted` is the
    response's answer, right or wrong, for majority votes; None: no answer, so no vote. `timed_out`: a wrong answer,
    because scoring the response took too long. `abstains`: the function gave None, as it does not judge this sample;
    the reward is 0.
    """

    reward: float
    correct: bool
    parts: dict[str, float] = field(default_factory=dict)
    extracted: str | None = None
    timed_out: bool = False
    abstains: bool = False


@dataclass(frozen=True)
class Options:
    """The flags `--reward-FIELD` that verifiers read. Plain values, because it is pickled to the workers."""

    pattern: str | None
    format: str
    length: int
    url: str | None
    retries: int
    concurrency: int  # requests, or calls of an async function, at a time
    memory_mb: int
    timeout: float  # seconds per sample
    workers: int

    @classmethod
    def of(cls, settings) -> "Options":
        """From `megarl.flags.settings.Settings`, whose import would be too slow for a worker."""
        return cls(
            pattern=settings.reward_pattern, format=settings.reward_format, length=settings.reward_length,
            url=settings.reward_url, retries=settings.reward_retries, concurrency=settings.reward_concurrency,
            memory_mb=settings.reward_memory_mb, timeout=settings.reward_timeout, workers=settings.reward_workers,
        )  # fmt: skip


@dataclass(frozen=True)
class BuiltIn:
    """`make` builds the function; `check` checks the prompts; `load` checks them with what the verifier imports.

    `limited`: it can hang, so it needs a time limit. `threads`: it enforces the limit itself and may run on as many
    threads as this option says. `wrong`: its score of a response with which it takes too long. `isolated`: a process of
    its own scores each response and says whether that took too long.
    """

    make: Callable[[Options], Callable[[Sample], Score | float]]
    check: Callable[["PromptSet"], None] | None = None
    load: Callable[["PromptSet", Options], None] | None = None
    limited: bool = True
    threads: str | None = None
    wrong: Score | None = None
    isolated: bool = False


def reference_sample(sample: Sample) -> Sample:
    """The sample with its answer as the response, or an empty one: does a verifier fare better with it?"""
    answer = sample.answer or ""
    return replace(sample, response=answer, finished=True, turns=only_turn(answer))


class ScoringError(Exception):
    """A verifier has no score for a sample; the message is the whole reason."""


class TimedOut(str):
    """The reason of a failure that was a time-out."""


@dataclass(frozen=True)
class Job:
    """One call of the verifier `name`, for one sample, for a group if it is grouped, or for all if it is batched.

    Its time limit is `seconds`.
    """

    name: str
    samples: list[Sample]
    seconds: float


def batched(function: Callable) -> Callable:
    """Mark a plug-in that takes the list of all samples of a step and returns one result per sample."""
    function.batched = True  # type: ignore[attr-defined]  # functions have attributes
    return function


def grouped(function: Callable) -> Callable:
    """Mark a plug-in that takes the list of all samples of one prompt, in order, and returns one result per sample."""
    function.grouped = True  # type: ignore[attr-defined]
    return function


def whole_response(sample: Sample) -> str | None:
    """The whole response as its answer; None if it is empty or was cut at the length limit."""
    return sample.response.strip() or None if sample.finished else None


def failure(name: str, sample: Sample, problem: object) -> str:
    """One line that says why the verifier `name` has no score for a sample; exceptions with their type and place."""
    if isinstance(problem, BaseException) and not isinstance(problem, ScoringError):
        problem = f"{shown_error(problem)}{place_of(problem)}"
    text = str(problem) if len(str(problem)) <= _LONGEST else f"{str(problem)[:_LONGEST]}…"
    return f"reward {name} on prompt {_shown(sample.prompt)}: {text}; the response was {_shown(sample.response)}"


def _shown(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "...")


class Verifier:
    """One named reward function, with its results checked.

    The function maps a Sample to a Score, or to one of the forms that `_score_of` reads. A function marked `batched` or
    `grouped` maps a list of samples to a list of these. It may be async: one of single samples is then called for
    all of them together.
    """

    def __init__(self, name: str, function: Callable, seconds: float = math.inf, concurrency: int = 1):
        """`seconds`: limit of an async call for one sample; `concurrency`: such calls at a time."""
        self.name = name
        self.batched = bool(getattr(function, "batched", False))
        self.grouped = bool(getattr(function, "grouped", False))
        self._takes_list = self.batched or self.grouped
        self.concurrent = not self._takes_list and user_results.is_async(function)
        self._function, self._seconds, self._concurrency = function, seconds, concurrency

    def outcomes(self, samples: list[Sample]) -> list[Score | str]:
        """For each sample a Score, or the reason for having none. A function of a list is called once; all samples
        fail if it raises."""
        if self.concurrent:
            work = user_results.together(self._function, samples, self._seconds, self._concurrency)
            return list(map(self._checked, samples, user_results.run(work)))
        calls = [samples] if self._takes_list else [[sample] for sample in samples]
        return [outcome for call in calls for outcome in self._outcomes(call)]

    def _outcomes(self, samples: list[Sample]) -> list[Score | str]:
        """Those of one call."""
        try:
            if self._takes_list:
                results = _listed(user_results.settled(self._function(samples)))
            else:
                results = [user_results.settled(self._function(samples[0]))]
            if len(results) != len(samples):
                raise ValueError(f"returned {len(results)} results for {len(samples)} samples")
        except (Exception, SystemExit) as error:
            return [failure(self.name, sample, error) for sample in samples]
        return list(map(self._checked, samples, results))

    def _checked(self, sample: Sample, result: Any) -> Score | str:
        if isinstance(result, user_results.LateCall):
            return TimedOut(failure(self.name, sample, ScoringError(result)))
        if isinstance(result, BaseException):
            return failure(self.name, sample, result)
        try:
            return _plain(_score_of(result, sample))
        except ValueError as error:
            return failure(self.name, sample, ScoringError(shown_error(error).removeprefix("ValueError: ")))
        except Exception as error:  # objects of the user can raise anything, and lists and objects can be endless
            return failure(self.name, sample, f"its result cannot be read ({shown_error(error)})")


def _listed(results: Any) -> list[Any]:
    """The results of a function of a list; a dictionary has them in `rewards` (OpenRLHF), an array in its first
    dimension."""
    return list(results["rewards"] if isinstance(results, dict) and "rewards" in results else results)


def _score_of(result: Any, sample: Sample) -> Any:
    """The Score of a result, or the result itself if it is none.

    A number x is Score(x, correct=x >= 1, extracted=the whole response if finished). None abstains. A list of one
    result is that (TRL). A dictionary has the number in `score` (verl), `reward` or `rewards` (OpenRLHF), and perhaps
    `acc`, whether the response is correct, and `pred`, its answer; other keys are not read.
    """
    if isinstance(result, list | tuple) and len(result) == 1:
        result = result[0]
    if result is None:
        return Score(0.0, False, abstains=True)
    if isinstance(result, dict):
        number = next((result[name] for name in ("score", "reward", "rewards") if name in result), None)
        score = None if number is None else _score_of(number, sample)
        if not isinstance(score, Score):
            return result
        correct, answer = user_results.number_of(result.get("acc")), result.get("pred")
        is_correct = score.correct if correct is None else correct > 0
        return replace(score, correct=is_correct, extracted=answer if isinstance(answer, str) else score.extracted)
    number = user_results.number_of(result)
    return result if number is None else Score(number, number >= 1.0, extracted=whole_response(sample))


def _plain(result: object) -> Score:
    """A verifier's result with plain numbers. ValueError: what is wrong with it."""
    if not isinstance(result, Score):
        raise ValueError(f"returned {type(result).__name__}{_keys(result)}, not a Score or a number")
    reward, parts = value_of("reward", result.reward), parts_of(result.parts)
    if parts and not math.isclose(math.fsum(parts.values()), reward, rel_tol=1e-6, abs_tol=1e-6):
        raise ValueError(f"parts {shown(result.parts)} do not add up to {shown(result.reward)}")
    if not isinstance(result.extracted, str | None):
        raise ValueError(f"extracted is {shown(result.extracted)}, neither a string nor None")
    flags: dict[str, Any] = {name: bool(getattr(result, name)) for name in ("correct", "timed_out", "abstains")}
    return replace(result, reward=reward, parts=parts, **flags)


def _keys(result: object) -> str:
    """The keys of a dictionary that is no result, for its error."""
    return f" with {', '.join(map(shown, list(result)[:5])) or 'no key'}" if isinstance(result, dict) else ""
