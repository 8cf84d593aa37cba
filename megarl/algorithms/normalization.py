"""Running mean and deviation of scores, the same whatever the layout: every rank sees all scores in one order."""

import torch
from torch import Tensor

ENSEMBLES = ("mean", "min")  # ways in which the scores of several models become one
SMALLEST = 1e-8  # deviation below which scores count as equal


class RunningMoments:
    """Count, mean and sum of squared deviations of all values so far (Chan, Golub, LeVeque 1983, eq. 1.5)."""

    def __init__(self):
        self.count, self.mean, self.squares = 0, 0.0, 0.0

    @property
    def deviation(self) -> float:
        """Standard deviation of all values so far (divided by count − 1); 0 of less than two."""
        return (self.squares / (self.count - 1)) ** 0.5 if self.count > 1 else 0.0

    def update(self, values: Tensor):
        """Takes in values [N]; a sum of squares about the common mean loses no digits, however far it is from 0."""
        n, values = len(values), values.detach().double()
        if not n:
            return
        mean = float(values.mean())
        shift, total = mean - self.mean, self.count + n
        self.squares += float((values - mean).square().sum()) + shift**2 * self.count * n / total
        self.mean += shift * n / total
        self.count = total

    def normalize(self, values: Tensor) -> Tensor:
        """(values − mean) / deviation, in fp64."""
        return (values.double() - self.mean) / max(self.deviation, SMALLEST)

    def state_dict(self) -> dict[str, float]:
        """For a checkpoint; JSON keeps each number to the last bit."""
        return {"count": self.count, "mean": self.mean, "squares": self.squares}

    def load_state_dict(self, state: dict[str, float]):
        """Takes up what `state_dict` gave."""
        self.count, self.mean, self.squares = state["count"], state["mean"], state["squares"]


def clip(values: Tensor, limit: float | None) -> Tensor:
    """Values within ± limit; None: as they are."""
    return values if limit is None else values.clamp(-limit, limit)


def combine(scores: Tensor, how: str) -> Tensor:
    """[K, N] scores of an ensemble -> [N]: their mean, or the lowest, which trusts no single model (2310.02743 §3).

    Raises:
        ValueError: another way than 'mean' or 'min'.
    """
    if how not in ENSEMBLES:
        raise ValueError(f"how {how!r}: allowed are {' and '.join(ENSEMBLES)}")
    return scores.mean(0) if how == "mean" else torch.amin(scores, 0)
