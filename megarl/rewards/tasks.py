"""The verifier `reasoning-gym`: the scorers of the tasks in the package reasoning_gym."""

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

from megarl.data.prompts import PromptSet
from megarl.errors import UsageError
from megarl.rewards.base import Sample, Score, ScoringError
from megarl.rewards.built_in import BuiltIn
from megarl.rewards.isolated import Isolated
from megarl.rewards.task_text import EXPRESSIONS, LITERALS, harmless, make_safe
from megarl.rewards.text import answer_text, check_metadata

# Every task scores a right answer exactly 1.0. Partly right ones get less: 0.01 for a wrong but well-formed answer, or
# 0.9999999999999999 for a word spelt backward followed by more letters.
_CORRECT_FROM = 1.0
WRONG = Score(0.0, False, {"reasoning_gym": 0.0})


def reasoning_gym(seconds: float) -> Callable[[Sample], Score]:
    """A verifier: the score, 0 to 1, of the task's own scorer in reasoning_gym; partly right answers get less than 1.

    The task is `metadata["source_dataset"]`. Scores the text in the last `<answer>...</answer>`, or the whole response
    without one. Some scorers raise on text that they cannot parse: that counts as a wrong answer if the same scorer
    accepts the reference answer. A response cut by the length limit scores 0. Every response is scored on a copy of
    the metadata in a confined process (`isolated`), which takes at most `seconds`; it has the process for itself if
    the scorer evaluates text.
    """
    isolated = Isolated("reasoning-gym", seconds)

    def verify(sample: Sample) -> Score:
        source_dataset(sample.metadata)
        if sample.finished:
            return isolated(sample)
        isolated.prepare(sample.metadata)
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


def prepare(metadata: dict[str, Any] | None):
    """Build the scorer for samples with this metadata."""
    task_scorer(source_dataset(metadata))


def prepared() -> int:
    """Number of scorers that have been built."""
    return task_scorer.cache_info().currsize


def may_share(metadata: dict[str, Any] | None) -> bool:
    """Whether the task's scorer only compares the response's text."""
    return source_dataset(metadata) not in LITERALS | EXPRESSIONS


def warm_up():
    import reasoning_gym  # noqa: F401


def check_tasks(prompts: PromptSet):
    """UsageError for the first line that does not name its task; does not import reasoning_gym."""
    if importlib.util.find_spec("reasoning_gym") is None:
        raise UsageError("--reward reasoning-gym: the package reasoning_gym is not installed")
    check_metadata("reasoning-gym", prompts, source_dataset)


def load_tasks(prompts: PromptSet):
    """Build the scorer of every task in `prompts`; UsageError for a task that reasoning_gym cannot score."""
    isolated, known = Isolated("reasoning-gym", 1.0), set()
    for prompt in prompts:
        task = source_dataset(prompt.metadata)
        if task in known:
            continue
        try:
            isolated.prepare({"source_dataset": task})
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


REASONING_GYM = BuiltIn(
    lambda options: reasoning_gym(options.timeout),
    check_tasks,
    lambda prompts, _: load_tasks(prompts),
    limited=False,
    threads="workers",
    isolated=True,
)
