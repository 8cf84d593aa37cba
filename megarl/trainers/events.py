"""After which steps a run evaluates, saves and exports: what the trainers ask, and what `--check` prints; and which
evaluation so far is the best, after which a checkpoint is saved, too.
"""

import math
from dataclasses import dataclass

import torch.distributed as dist

from megarl.arguments import RunConfig


def is_due(step: int, interval: int, last: int) -> bool:
    """Whether an action is due after a step that runs every `interval` steps (0: never) and after the last one."""
    return step == last or bool(interval and step % interval == 0)


@dataclass(frozen=True)
class RunEvents:
    """The events of a run that does steps `first` to `last`; a signal, a limit or a target may end it earlier.

    `keeps_best`: it also saves after an evaluation that is the best so far. `exports`: folders that get a folder with
    each checkpoint.
    """

    first: int
    last: int
    evaluates: bool
    evaluates_before: bool
    eval_interval: int
    saves: bool
    save_interval: int
    keeps_best: bool
    exports: tuple[str, ...]

    def evaluations(self) -> list[int]:
        """Steps after which held-out prompts are evaluated; 0: before the first."""
        return [0] * self.evaluates_before + self._due(self.eval_interval) * self.evaluates

    def checkpoints(self) -> list[int]:
        """Steps after which a checkpoint is saved for certain, and with it the exports."""
        return self._due(self.save_interval) * self.saves

    def _due(self, interval: int) -> list[int]:
        return [step for step in range(self.first, self.last + 1) if is_due(step, interval, self.last)]


def events_of(config: RunConfig, done: int) -> RunEvents:
    """The events of a training run. `done`: steps of the checkpoint from which it resumes; 0 for a new run."""
    s = config.settings
    saves = s.save is not None and not s.debug_rollout_only  # which changes no weights
    return RunEvents(
        first=done + 1,
        last=s.train_iters,
        evaluates=s.evaluates,
        evaluates_before=s.evaluates and "rollout" in config.roles and not done,
        eval_interval=s.eval_interval,
        saves=saves,
        save_interval=s.save_interval,
        keeps_best=saves and s.evaluates and s.keep_best,
        exports=tuple(name for name, wanted in (("hf", s.export_hf), ("peft", s.export_peft)) if wanted and saves),
    )


class BestCheckpoint:
    """The best evaluation of a run so far, the same on every rank."""

    def __init__(self, metric: str):
        """`metric`: of which the best value is wanted, without `eval/`; of `loss` the lowest, of others the highest."""
        self.metric, self.sign = metric, -1 if metric == "loss" else 1
        self.value: float | None = None
        self.step: int | None = None

    def update(self, metrics: dict[str, float] | None, step: int) -> bool:
        """Whether the evaluation after `step` is the best so far; of equal ones, the earlier is the best.

        `metrics` are the evaluation's, on rank 0. A value that is not a number, or is missing since all its episodes
        failed, is never the best. A collective of the world.
        """
        found = [math.nan if metrics is None else metrics.get(f"eval/{self.metric}", math.nan)]
        dist.broadcast_object_list(found, src=0)
        (value,) = found
        is_best = not math.isnan(value) and (self.value is None or self.sign * value > self.sign * self.value)
        if is_best:
            self.value, self.step = value, step
        return is_best

    def state_dict(self) -> dict:
        return {self.metric: self.value, "step": self.step}

    def load_state_dict(self, state: dict):
        self.value, self.step = state.get(self.metric), state["step"]
