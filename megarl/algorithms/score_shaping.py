"""What becomes of scores before the advantages: ensembles, normalization, clipping, and the penalty on length.

Every rank gets all scores in one order, so running moments do not depend on the layout.
"""

from megarl.deferred import Tensor, torch

ENSEMBLES = ("mean", "min")  # ways to combine the scores of several models
MIN_DEVIATION = 1e-8  # lower bound of the deviation in `normalize`


class RunningMoments:
    """Count, mean and sum of squared deviations of all values so far (Chan, Golub, LeVeque 1983, eq. 1.5)."""

    def __init__(self):
        self.count, self.mean = 0, 0.0
        self.squares = 0.0

    @property
    def deviation(self) -> float:
        """Standard deviation of all values so far (divided by count − 1); 0 for fewer than two."""
        return (self.squares / (self.count - 1)) ** 0.5 if self.count > 1 else 0.0

    def update(self, values: Tensor):
        """Add values [N]. Squares are summed about the mean, which loses no digits however far the mean is from 0."""
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
        return (values.double() - self.mean) / max(self.deviation, MIN_DEVIATION)

    def state_dict(self) -> dict[str, float]:
        """State for a checkpoint; JSON preserves each number to the last bit."""
        return {"count": self.count, "mean": self.mean, "squares": self.squares}

    def load_state_dict(self, state: dict[str, float]):
        """Resume from a `state_dict`."""
        self.count, self.mean = int(state["count"]), state["mean"]
        self.squares = state["squares"]


def clip(values: Tensor, limit: float | None) -> Tensor:
    """Clamp values to ± limit; None: unchanged."""
    return values if limit is None else values.clamp(-limit, limit)


def combine(scores: Tensor, how: str) -> Tensor:
    """[K, N] scores of an ensemble -> [N]: their mean, or minimum, which no single model can raise (2310.02743 §3)."""
    return scores.mean(0) if how == "mean" else torch.amin(scores, 0)


def overlong_penalty(response_lengths: Tensor, limit: int | Tensor, buffer: int) -> Tensor:
    """0 up to limit − buffer tokens, then falling linearly to −1 at the limit, −1 beyond.

    Soft overlong punishment of DAPO (arXiv 2503.14476, eq. 13), with L_max = `limit`, of all responses or [N] of each,
    and L_cache = `buffer`, 1 … limit tokens, else ValueError. [N] float32 of response lengths [N].
    """
    least = limit if isinstance(limit, int) else min(limit.tolist(), default=buffer)
    if not 1 <= buffer <= least:
        raise ValueError(f"overlong buffer must be in [1, limit {least}], got {buffer}")
    return ((limit - buffer - response_lengths).double() / buffer).clamp(-1, 0).float()
