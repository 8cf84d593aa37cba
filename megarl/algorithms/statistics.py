"""Mean, variance, whitening and explained variance of values that are spread over ranks and micro-batches.

Each statistic comes as two functions. The first gives local sums (float64, additive), the caller adds them up over
micro-batches and all-reduces them once; the second turns the global sums into the result. Splits of the same values
give the same result up to float64 rounding.

Precision: a variance from a sum of squares loses the digits that mean² has above the variance. With float64 sums its
relative error is about 1e-16 · (1 + mean²/variance): 1e-8 where the mean is 10,000 standard deviations from 0, far
beyond rewards, values and advantages. A variance below 1e-14 · mean² cannot be told from rounding and counts as 0.
"""

import torch
from torch import Tensor

from megarl.algorithms.packed import require_same_shape

_ROUNDING = 1e-14  # relative noise of a float64 sum of squares, with room for the order of the additions


def local_moments(values: Tensor, mask: Tensor) -> Tensor:
    """Additive moments of the valid entries: float64 [3] = (count, sum, sum of squares).

    Args:
        values: [T], any floating dtype.
        mask: [T] bool.

    Raises:
        ValueError: shapes differ.
    """
    require_same_shape(values=values, mask=mask)
    valid = torch.where(mask, values.detach().double(), 0.0)
    return torch.stack([mask.sum().double(), valid.sum(), valid.square().sum()])


def mean_and_variance(moments: Tensor, unbiased: bool = True) -> tuple[Tensor, Tensor]:
    """Global mean and variance (two float64 scalars) from all-reduced `local_moments` [3].

    `unbiased` divides the centred squares by count − 1, else by count. Count 0 gives (0, 0); count 1 gives variance 0
    under both conventions, where the unbiased one is undefined.
    """
    count, total, total_of_squares = moments.double().unbind()
    mean = total / count.clamp(min=1)
    return mean, _centred_squares(count, total, total_of_squares) / (count - int(unbiased)).clamp(min=1)


def whiten(
    values: Tensor,
    mask: Tensor,
    moments: Tensor,
    shift_mean: bool = True,
    epsilon: float = 1e-8,
    unbiased: bool = True,
) -> Tensor:
    """Scale the valid entries to unit variance, and to mean 0 with `shift_mean`, by global moments.

    (x − mean) / sqrt(variance + epsilon), plus the mean again without `shift_mean`. The defaults are the convention of
    verl: unbiased variance, epsilon inside the root.

    Args:
        values: [T]. Computed in float64, returned in the dtype of `values`.
        mask: [T] bool. Outside it the result is 0.
        moments: float64 [3], `local_moments` summed over all ranks and micro-batches.
        epsilon: keeps equal values finite: they come out as 0 (as themselves without `shift_mean`).
        unbiased: divide by count − 1 (True) or by count (False).

    A single valid token has variance 0 here, so it comes out as 0: it gives no learning signal.

    Raises:
        ValueError: shapes differ.
    """
    require_same_shape(values=values, mask=mask)
    mean, variance = mean_and_variance(moments, unbiased)
    whitened = (values.double() - mean) * torch.rsqrt(variance + epsilon)
    if not shift_mean:
        whitened = whitened + mean
    return torch.where(mask, whitened, 0.0).to(values.dtype)


def explained_variance_moments(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """Additive sums for `explained_variance`: float64 [5] = (count, ΣR, ΣR², Σ(R−V), Σ(R−V)²).

    Args:
        values: [T] predictions V of the critic.
        returns: [T] targets R.
        mask: [T] bool.

    Raises:
        ValueError: shapes differ.
    """
    require_same_shape(values=values, returns=returns, mask=mask)
    residuals = returns.double() - values.double()
    return torch.cat([local_moments(returns, mask), local_moments(residuals, mask)[1:]])


def explained_variance(moments: Tensor) -> float:
    """1 − Var[R − V] / Var[R] from all-reduced `explained_variance_moments` [5].

    1 means a perfect critic up to a constant, 0 one that is no better than a constant, below 0 one that is worse.
    Returns that are all equal (or no or one token) have nothing to explain: 0.0.
    """
    count, returns, returns_squared, residuals, residuals_squared = moments.double().unbind()
    variance = _centred_squares(count, returns, returns_squared)
    if variance == 0:
        return 0.0
    return float(1 - _centred_squares(count, residuals, residuals_squared) / variance)


def _centred_squares(count: Tensor, total: Tensor, total_of_squares: Tensor) -> Tensor:
    """Σ(x − mean)² from raw sums; what is below the rounding of the subtraction, or negative, is 0."""
    centred = total_of_squares - total.square() / count.clamp(min=1)
    return torch.where(centred > _ROUNDING * total_of_squares, centred, torch.zeros_like(centred))
