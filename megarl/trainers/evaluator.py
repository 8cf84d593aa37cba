"""Evaluation on held-out prompts, one code for the trainer and for the program `evaluate`; and which one was best.

Responses are greedy at `--eval-temperature` 0, else sampled from random streams that no training step draws from. Every
number is a mean over prompts of a number that one prompt's responses give, so no layout changes it.
"""

import itertools
from collections.abc import Sequence
from statistics import fmean

import torch.distributed as dist

from megarl.algorithms.pass_at_k import maj_at_k, mean_at_k, pass_at_k
from megarl.arguments import Settings
from megarl.comm import load_balance
from megarl.comm.role_mesh import RoleMesh
from megarl.comm.step_batch import ROLLOUT, StepBatch
from megarl.data.prompts import PromptSet
from megarl.flags.settings import whole_numbers
from megarl.observe.timers import Timers
from megarl.roles.reward import Reward
from megarl.rollout.requests import PromptRequest
from megarl.rollout.rollout import Rollout

EVAL_STEP = 2**31  # names random streams that no training step draws from


def ks_of(settings: Settings) -> tuple[int, ...]:
    """The k of pass@k, mean@k and maj@k, ascending: `--eval-k`, or else 1 and `--eval-responses`.

    None by default for a single response: each would be the accuracy once more.
    """
    given, n = settings.eval_k, settings.eval_responses
    if given is None:
        return (1, n) if n > 1 else ()
    return tuple(sorted(set(whole_numbers(given))))


def prompt_metrics(rows: list[dict], ks: Sequence[int]) -> dict[str, float]:
    """What the responses to one prompt give, by name; `rows` are those of the reward role, in order of samples.

    `maj@k` is left out where no response gives an answer.
    """
    correct, answers = [row["correct"] for row in rows], [row["extracted"] for row in rows]
    found = {"accuracy": fmean(correct)}
    found |= {f"pass@{k}": pass_at_k(len(rows), sum(correct), k) for k in ks}
    found |= {f"mean@{k}": mean_at_k(correct, k) for k in ks}
    if any(answer is not None for answer in answers):
        found |= {f"maj@{k}": maj_at_k(answers, correct, k) for k in ks}
    values = [row["reward_values"] for row in rows]
    found |= {f"reward/{term}": fmean(value[term] for value in values) for term in values[0] if len(values[0]) > 1}
    return found | {
        "reward": fmean(row["reward"] for row in rows),
        "response_length_mean": fmean(row["length"] for row in rows),
        "finished_fraction": fmean(row["finished"] for row in rows),
    }


def mean_metrics(prompts: list[dict[str, float]]) -> dict[str, float]:
    """Means of `prompt_metrics` over prompts.

    A prompt whose responses give no answer counts as 0 in `maj@k`. That has no value where this holds of all prompts:
    a verifier that names no answers is not one whose majorities are wrong.
    """
    names = max(prompts, key=len)  # with maj@k, if any prompt has it
    return {name: fmean(prompt.get(name, 0.0) for prompt in prompts) for name in names}


class Evaluator:
    """Writes, scores and counts; reports by task where the prompts are of several."""

    def __init__(
        self, settings: Settings, mesh: RoleMesh, rollout: Rollout, reward: Reward, prompts: PromptSet,
        tokens: list[list[int]], timers: Timers,
    ):  # fmt: skip
        """`tokens` are those of each prompt; the first `--eval-samples` prompts are evaluated."""
        self.settings, self.mesh, self.timers = settings, mesh, timers
        self.rollout, self.reward, self.prompts = rollout, reward, prompts
        self.ks = ks_of(settings)
        self.requests = [PromptRequest(line, ids) for line, ids in enumerate(tokens[: settings.eval_samples])]

    def evaluate(self) -> dict[str, float] | None:
        """Metrics by name on rank 0, None elsewhere: `eval/accuracy`, `eval/pass@4`, `eval/<task>/accuracy`, …

        A collective of the world. Prompts without a task count in the whole only.
        """
        n, s = self.settings.eval_responses, self.settings
        self.reward.prepare(self.prompts, [request.line for request in self.requests])
        responses = self.rollout.generate(self.requests, n, EVAL_STEP, temperature=s.eval_temperature)
        count = len(self.requests) * n
        dp_assignment = load_balance.round_robin_assignment(self.mesh, count, n)
        dp_assignment |= {ROLLOUT: self.rollout.dp_assignment(responses, count)}
        step_batch = StepBatch(self.mesh, self.timers, dp_assignment, responses, EVAL_STEP, self.prompts)
        step_batch.dispatch("reward")
        self.reward.score(step_batch, for_training=False)
        by_prompt = itertools.groupby(self._rows(), lambda row: row["sequence"] // n)
        found = self._gather([(line, prompt_metrics(list(rows), self.ks)) for line, rows in by_prompt])
        return None if found is None else self._by_task([metrics for _, metrics in found])

    def samples(self) -> list[dict] | None:
        """All responses of the last run with their prompts' tasks, on rank 0 (None elsewhere). Collective."""
        n = self.settings.eval_responses
        rows = self._gather([(row["sequence"], row) for row in self._rows()])
        return rows and [row | {"task": self.prompts[number // n].task} for number, row in rows]

    def _rows(self) -> list[dict]:
        """Rows of the last run's responses of which this rank speaks, in ascending sequence; whole prompts each."""
        return self.reward.rows if self.mesh["reward"].is_leader else []

    def _gather(self, items: list[tuple]) -> list[tuple] | None:
        """The (number, …) pairs of all ranks in ascending order, on rank 0."""
        gathered = self.mesh.gather(items)
        return gathered and sorted(itertools.chain(*gathered), key=lambda item: item[0])

    def _by_task(self, prompts: list[dict[str, float]]) -> dict[str, float]:
        tasks = [self.prompts[line].task for line in range(len(prompts))]
        found = {f"eval/{name}": value for name, value in mean_metrics(prompts).items()}
        for task in sorted(set(tasks) - {None}) if len(set(tasks)) > 1 else []:
            means = mean_metrics([metrics for metrics, its in zip(prompts, tasks, strict=True) if its == task])
            found |= {f"eval/{task}/{name}": value for name, value in means.items()}
        return found


class BestCheckpoint:
    """The best evaluation of a run so far, the same on every rank."""

    def __init__(self, mesh: RoleMesh):
        self.mesh = mesh
        self.accuracy: float | None = None
        self.step: int | None = None

    def update(self, metrics: dict[str, float] | None, step: int) -> bool:
        """Whether the evaluation behind a step has the highest accuracy so far; an equal one leaves the earlier.

        `metrics` is what `Evaluator.run` returned. A collective of the world.
        """
        told = [None if metrics is None else metrics["eval/accuracy"]]
        dist.broadcast_object_list(told, src=0)
        is_best = self.accuracy is None or told[0] > self.accuracy
        if is_best:
            self.accuracy, self.step = told[0], step
        return is_best

    def state_dict(self) -> dict:
        """For the manifest of a checkpoint."""
        return {"accuracy": self.accuracy, "step": self.step}

    def load_state_dict(self, state: dict):
        """Takes up what `state_dict` gave."""
        self.accuracy, self.step = state["accuracy"], state["step"]
