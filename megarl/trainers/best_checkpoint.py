"""The best evaluation of a run so far, after which a checkpoint is saved."""

import math

import torch.distributed as dist


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
        found = [None if metrics is None else metrics.get(f"eval/{self.metric}", math.nan)]
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
