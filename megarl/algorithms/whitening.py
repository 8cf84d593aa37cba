"""Mean, variance and whitening of values distributed over ranks and micro-batches.

`local_moments` returns local sums (float64, additive), which the caller adds over micro-batches and all-reduces once;
the results are computed from the global sums. Any split of the same values gives the same result up to float64
rounding. ValueError if shapes differ.

Precision: a variance from a sum of squares loses the digits by which mean² exceeds the variance. With float64 sums its
relative error is about 1e-16 · (1 + mean²/variance): 1e-8 if the mean is 10,000 standard deviations from 0, far
beyond rewards, values and advantages. A variance below 1e-14 · mean² is indistinguishable from rounding and is 0.
"""

from megarl.algorithms.packed import require_same_shape
from megarl.deferred import Tensor, torch

_ROUNDING = 1e-14  # relative rounding error of a float64 sum of squares, with a margin for the order of additions


def local_moments(values: Tensor, mask: Tensor) -> Tensor:
    """Additive moments of the valid entries: float64 [3] = (count, sum, sum of squares).

    Args:
        values: [T], any floating dtype.
        mask: [T] bool.
    """
    require_same_shape(values=values, mask=mask)
    valid = torch.where(mask, values.detach().double(), 0.0)
    return torch.stack([mask.sum().double(), valid.sum(), valid.square().sum()])


def mean_and_variance(moments: Tensor) -> tuple[Tensor, Tensor]:
    """Global mean and unbiased variance (two float64 scalars) from all-reduced `local_moments` [3].

    Count 0 gives (0, 0); count 1 gives variance 0.
    """
    count, total, total_of_squares = moments.double().unbind()
    mean = total / count.clamp(min=1)
    return mean, centred_squares(count, total, total_of_squares) / (count - 1).clamp(min=1)


def whiten(values: Tensor, mask: Tensor, moments: Tensor) -> Tensor:
    """Scale the valid entries to mean 0 and unit variance by global moments: (x − mean) / sqrt(variance + 1e-8).

    As in verl: unbiased variance, epsilon inside the root. It keeps equal values finite: they become 0.

    Args:
        values: [T]. Computed in float64, returned in the dtype of `values`.
        mask: [T] bool. Outside it the result is 0.
        moments: float64 [3], `local_moments` summed over all ranks and micro-batches.

    A single valid token has variance 0, so it becomes 0.
    """
    require_same_shape(values=values, mask=mask)
    mean, variance = mean_and_variance(moments)
    whitened = (values.double() - mean) * torch.rsqrt(variance + 1e-8)
    return torch.where(mask, whitened, 0.0).to(values.dtype)


def centred_squares(count: Tensor, total: Tensor, total_of_squares: Tensor) -> Tensor:
    """Σ(x − mean)² from raw sums; 0 if negative or below the rounding error of the subtraction."""
    centred = total_of_squares - total.square() / count.clamp(min=1)
    return torch.where(centred > _ROUNDING * total_of_squares, centred, torch.zeros_like(centred))
