"""Evaluations on held-out prompts: of `--eval-prompts`, and of each file of `--evals` by its name.

Responses are greedy at `--eval-temperature` 0, otherwise sampled from random streams that no training step uses. Every
metric is computed per prompt and then averaged over prompts, so it does not depend on the parallel layout.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import fmean

from megarl.arguments import Settings
from megarl.checkpoint.resume import EVAL_PROMPTS, is_held_out
from megarl.comm import load_balance
from megarl.comm.role_mesh import RoleMesh
from megarl.comm.step_batch import ROLLOUT, StepBatch
from megarl.data.prompts import PromptSet
from megarl.data.ragged import Ragged
from megarl.errors import UsageError, one_line
from megarl.flags.fields import parse_ints
from megarl.groups import PromptGroups
from megarl.measurements import ALLOWED_NAMES, MAX_TASKS, is_name
from megarl.observe.timers import Timers
from megarl.rewards.expression import expressions_of, rewards_of
from megarl.roles.reward import Reward
from megarl.rollout.remote_generator import RemoteRollout
from megarl.rollout.requests import PromptRequest, dp_assignment_of
from megarl.rollout.rollout import Rollout
from megarl.trainers.prompt_inputs import name_of_eval
from megarl.trainers.step_reports import rows_so_far

ACCURACY = "accuracy"
EVAL_STEP = 2**31  # step number of the random streams; no training step has it


def eval_ks(settings: Settings) -> tuple[int, ...]:
    """The k of pass@k, mean@k and maj@k, ascending: `--eval-k`, by default 1 and `--eval-responses`.

    Empty by default for a single response, where each of them equals the accuracy.
    """
    given, n = settings.eval_k, settings.eval_responses
    if given is None:
        return (1, n) if n > 1 else ()
    return tuple(sorted(set(parse_ints(given))))


def prompt_metrics(rows: list[dict], ks: Sequence[int]) -> dict[str, float]:
    """Metrics of the responses to one prompt, by name; `rows` come from the reward role, in the order of samples.

    Omits `maj@k` if no response contains an answer. Where episodes have failed, there may be fewer rows than k: then
    all of them count.
    """
    correct, answers = [row["correct"] for row in rows], [row["extracted"] for row in rows]
    metrics = {"accuracy": fmean(correct)}
    counts = {k: min(k, len(rows)) for k in ks}
    metrics |= {f"pass@{k}": pass_at_k(len(rows), sum(correct), count) for k, count in counts.items()}
    metrics |= {f"mean@{k}": mean_at_k(correct, count) for k, count in counts.items()}
    if any(answer is not None for answer in answers):
        metrics |= {f"maj@{k}": maj_at_k(answers, correct, count) for k, count in counts.items()}
    values = [row["reward_values"] for row in rows]
    if len(values[0]) > 1:
        by_term = {term: [value[term] for value in values if value[term] is not None] for term in values[0]}
        metrics |= {f"reward/{term}": fmean(known) for term, known in by_term.items() if known}
    return metrics | {
        "reward": fmean(row["reward"] for row in rows),
        "response_length_mean": fmean(row["length"] for row in rows),
        "finished_fraction": fmean(row["finished"] for row in rows),
    }


def mean_metrics(prompts: list[dict[str, float]]) -> dict[str, float]:
    """Means of `prompt_metrics` over prompts.

    A prompt whose responses contain no answer counts as 0 in `maj@k`. If no prompt has answers, `maj@k` is omitted: the
    verifier then extracts none. The mean of a term is over the prompts whose reward has it.
    """
    means = {}
    every = itertools.chain.from_iterable(prompts)  # one may lack maj@k, another a term
    for name in max(prompts, key=len) | dict.fromkeys(every):
        own = [prompt for prompt in prompts if name in prompt] if name.startswith("reward/") else prompts
        means[name] = fmean(prompt.get(name, 0.0) for prompt in own)
    return means


class Evaluator:
    """Generates and scores responses to held-out prompts; reports metrics per task if there are several."""

    def __init__(
        self, settings: Settings, mesh: RoleMesh, rollout: Rollout | RemoteRollout, reward: Reward, prompts: PromptSet,
        tokens: Ragged, timers: Timers,
    ):  # fmt: skip
        """`tokens`: token ids of each prompt. The first `--eval-samples` prompts are evaluated."""
        self.settings, self.mesh = settings, mesh
        self.timers = timers
        self.rollout, self.reward = rollout, reward
        self.prompts = prompts
        self.ks = eval_ks(settings)
        lines = range(min(len(tokens), settings.eval_samples))
        self.running: StepBatch | None = None  # what is being scored
        self._rows: list[dict] = []  # this rank's of the last evaluation, by sequence; a prompt's are on one rank
        limits = [prompts.response_limit(line) or settings.max_response_length for line in lines]
        self.requests = [
            PromptRequest(line, tokens.view(line), settings.eval_responses, limit, EVAL_STEP)
            for line, limit in zip(lines, limits, strict=True)
        ]

    def evaluate(self) -> dict[str, float] | None:
        """Metrics by name on rank 0, None elsewhere: `eval/accuracy`, `eval/pass@4`, `eval/<task>/accuracy`, …

        A collective of the world. Prompts without a task count only in the overall metrics. Episodes whose environment
        failed are left out; if all have, the accuracy is 0.
        """
        with self.timers.evaluation():
            by_prompt = self._scored_rows()
            valid = [(line, [row for row in rows if not row.get("failed")]) for line, rows in by_prompt]
        gathered = self._gather([(line, prompt_metrics(rows, self.ks)) for line, rows in valid if rows])
        if gathered is None:
            return None
        return self._by_task(dict(gathered)) if gathered else {"eval/accuracy": 0.0}

    def _scored_rows(self) -> Iterator[tuple[int, Iterator[dict]]]:
        """Generates and scores the responses; (line, its responses' rows) of the prompts that this rank scores."""
        n, s = self.settings.eval_responses, self.settings
        self.reward.prepare(self.prompts, [request.line for request in self.requests])
        responses = self.rollout.generate(
            self.requests, EVAL_STEP, temperature=s.eval_temperature, prompt_set=self.prompts
        )
        groups = PromptGroups.equal(len(self.requests), n)
        dp_assignment = load_balance.round_robin_assignment(self.mesh, groups)
        dp_assignment |= {ROLLOUT: dp_assignment_of(responses, groups.count, self.mesh[ROLLOUT])}
        step_batch = StepBatch(
            self.mesh, self.timers, dp_assignment, responses, EVAL_STEP, self.prompts, groups, s, in_evaluation=True
        )
        self.running = step_batch
        step_batch.dispatch("reward")
        self.reward.score(step_batch, for_training=False)
        self.running, self._rows = None, step_batch.rows
        step_batch.wait_sends()
        return itertools.groupby(self._rows, lambda row: row["sequence"] // n)

    def samples(self) -> list[dict] | None:
        """Rows of all responses of the last evaluation, with tasks, on rank 0 (None elsewhere). Collective."""
        n = self.settings.eval_responses
        rows = self._gather([(row["sequence"], row) for row in self._rows])
        return None if rows is None else [row | {"task": self.prompts[number // n].task} for number, row in rows]

    def _gather(self, items: list[tuple]) -> list[tuple] | None:
        """The (number, …) pairs of all ranks, sorted, on rank 0 (None elsewhere)."""
        gathered = self.mesh.gather(items)
        return gathered and sorted(itertools.chain.from_iterable(gathered), key=lambda item: item[0])

    def _by_task(self, by_line: dict[int, dict[str, float]]) -> dict[str, float]:
        prompts, tasks = list(by_line.values()), [self.prompts[line].task for line in by_line]
        result = {f"eval/{name}": value for name, value in mean_metrics(prompts).items()}
        for task in sorted(set(tasks) - {None}) if len(set(tasks)) > 1 else []:
            means = mean_metrics([metrics for metrics, other in zip(prompts, tasks, strict=True) if other == task])
            result |= {f"eval/{task}/{name}": value for name, value in means.items()}
        return result


class Evaluations:
    """Evaluates on one set after the other. Each draws its responses as it would alone."""

    def __init__(
        self, settings: Settings, mesh: RoleMesh, rollout: Rollout | RemoteRollout, reward: Reward,
        prompts: dict[str, PromptSet], tokens: dict[str, Ragged], timers: Timers,
    ):  # fmt: skip
        """`prompts`, `tokens`: of the held-out sets of `held_out`."""
        self._by_name = {
            name_of_eval(name): Evaluator(settings, mesh, rollout, reward, found, tokens[name], timers)
            for name, found in prompts.items()
        }
        self._running = next(iter(self._by_name.values()))

    @property
    def prompts(self) -> int:
        return sum(len(evaluator.requests) for evaluator in self._by_name.values())

    def evaluate(self, with_samples: bool = False) -> tuple[dict[str, float] | None, list[dict] | None]:
        """(metrics by name, rows of all responses `with_samples`) on rank 0, None elsewhere. A collective of the world.

        Metrics are `eval/accuracy`, and `eval/<name>/accuracy` of a named evaluation, whose rows have its name. Where
        all are named, `eval/accuracy` is the mean of theirs.
        """
        metrics: dict[str, float] = {}
        samples: list[dict] = []
        for name, evaluator in self._by_name.items():
            self._running = evaluator
            found, rows = evaluator.evaluate(), evaluator.samples() if with_samples else None
            if found is not None:
                metrics |= {named(metric, name): value for metric, value in found.items()}
            if rows is not None:
                samples += rows if name is None else [row | {"eval": name} for row in rows]
        if not metrics:
            return None, None
        if None not in self._by_name:
            mean = fmean(metrics[named(f"eval/{ACCURACY}", name)] for name in self._by_name)
            metrics = {f"eval/{ACCURACY}": mean} | metrics
        return metrics, samples

    def samples_so_far(self) -> Sequence[dict]:
        """Rows of the responses that this rank holds, for an evaluation that a reward or an environment ends."""
        evaluator = self._running
        return rows_so_far(evaluator.reward, evaluator.running, getattr(evaluator.rollout, "episodes", None))


def named(metric: str, name: str | None) -> str:
    """`eval/accuracy` -> `eval/<name>/accuracy`; of no name as it is."""
    return metric if name is None else f"eval/{name}/{metric.removeprefix('eval/')}"


def held_out(sets: dict) -> dict:
    """The entries of held-out sets, by their names in the manifest."""
    return {name: found for name, found in sets.items() if is_held_out(name)}


def check_best_metric(settings: Settings, prompts: dict[str, PromptSet]):
    """UsageError if no evaluation has the metric of `--best-metric`. `prompts`: the held-out sets."""
    wanted, n = settings.best_metric, settings.eval_samples
    if wanted is None:
        return
    common = [ACCURACY, "reward", *(f"{kind}@{k}" for kind in ("pass", "mean") for k in eval_ks(settings))]
    allowed = [ACCURACY] if prompts and EVAL_PROMPTS not in prompts else []
    for key, found in prompts.items():
        tasks = {found[line].task for line in range(min(len(found), n))} - {None}
        kinds = [*common, *_term_metrics(settings, found)]
        for task in ("", *(f"{task}/" for task in sorted(tasks) if len(tasks) > 1)):
            allowed += [named(f"eval/{task}{kind}", name_of_eval(key)).removeprefix("eval/") for kind in kinds]
    if wanted not in allowed:
        raise UsageError(f"--best-metric {wanted}: no evaluation has it; allowed: {', '.join(allowed)}")


def _term_metrics(settings: Settings, prompts: PromptSet) -> dict[str, None]:
    """Names of the metrics of terms: a reward of one term has none besides its own mean."""
    expressions = expressions_of(settings)
    texts = rewards_of(settings, prompts.entries) or [settings.reward]
    of_several = [expressions[text] for text in texts if len(expressions[text]) > 1]
    return {f"reward/{term.name}": None for terms in of_several for term in terms}


def check_names(prompts: dict[str, PromptSet], lines: int):
    """UsageError if metrics of a named evaluation would have the names of others, of a term or a task, or a task gives
    no name of a metric.

    `prompts`: the held-out sets; `lines`: how many of a set are evaluated.
    """
    tasks_of = {key: {found[line].task for line in range(min(len(found), lines))} for key, found in prompts.items()}
    for key, found in prompts.items():
        if len(tasks_of[key]) > 1:
            _check_tasks(tasks_of[key] - {None}, f"{found.flag} {found.path}")
    # First parts of the tasks' names.
    tasks = {task.partition("/")[0] for task in tasks_of.get(EVAL_PROMPTS, ()) if task is not None}
    for name in filter(None, map(name_of_eval, prompts)):
        if name in tasks:
            raise UsageError(
                f"--evals {name}: a task of --eval-prompts has metrics eval/{name}/…, too; give another name"
            )


def _check_tasks(tasks: set[str], where: str):
    if wrong := sorted(task for task in tasks if not is_name(task)):
        raise UsageError(one_line(f"{where}: task {wrong[0]!r:.120}: it names metrics; allowed are {ALLOWED_NAMES}"))
    if len(tasks) > MAX_TASKS:
        raise UsageError(
            f"{where}: {len(tasks):,} tasks, of which each has metrics of its own; allowed are {MAX_TASKS}; move what "
            "is no task to another column"
        )


# -- pass@k, mean@k and maj@k --------------------------------------------------------------------------------------

# Estimated from n responses to a prompt. All three are unbiased estimates of the result of k fresh responses,
# 1 ≤ k ≤ n, and deterministic: no subset is sampled.


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that k of n responses, c of them correct, include a correct one: 1 − C(n−c, k) / C(n, k).

    The unbiased estimator of 2107.03374, eq. 1. Its product form Π (1 − k/i) rounds at every factor; Python integers
    round only once, in the division.
    """
    every = math.comb(n, k)
    return (every - math.comb(n - c, k)) / every


def mean_at_k(correct: Sequence[bool], k: int) -> float:
    """Fraction of correct responses among those that vote in maj@k, so that maj@k − mean@k is the gain of voting.

    These are the first k·⌊n/k⌋ of n responses.
    """
    used = len(correct) // k * k
    return sum(correct[:used]) / used


def maj_at_k(answers: Sequence[str | None], correct: Sequence[bool], k: int) -> float:
    """Probability that the majority of k responses is correct (self-consistency, 2203.11171).

    The mean of `majority` over the ⌊n/k⌋ runs of k consecutive responses. The runs are disjoint, so for i.i.d.
    responses the estimate is unbiased. Arguments as for `majority`, one entry per response.
    """
    runs = [slice(start, start + k) for start in range(0, len(answers) - k + 1, k)]
    return math.fsum(majority(answers[run], correct[run]) for run in runs) / len(runs)


def majority(answers: Sequence[str | None], correct: Sequence[bool]) -> float:
    """Expected correctness of the most frequent answer, with ties broken at random; 0 without any answer.

    Args:
        answers: each response's answer; None (e.g. of a truncated response) does not vote.
        correct: each response's verdict. If verdicts of the same answer differ (e.g. of a verifier that reads the
            whole text), their mean counts.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    right = Counter(answer for answer, good in zip(answers, correct, strict=True) if good)
    top = max(votes.values(), default=0)
    winners = [answer for answer, count in votes.items() if count == top]
    return sum(right[answer] for answer in winners) / (top * len(winners)) if winners else 0.0
