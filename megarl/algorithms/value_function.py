"""The critic: its loss per token, before aggregation, and how much of the returns' variance it explains."""

from typing import NamedTuple

from megarl.algorithms.aggregation import centred_squares, local_moments
from megarl.algorithms.packed import require_same_shape
from megarl.deferred import Tensor, torch


class ValueTerms(NamedTuple):
    """Per-token terms of the value loss."""

    loss: Tensor  # [T], differentiable in the values
    clipped: Tensor  # [T] bool, the clipped value has the larger error, so the token has no gradient


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip_range: float) -> ValueTerms:
    """½·max((V − R)², (clip(V, V_old − ε, V_old + ε) − R)²).

    The value clipping of the PPO reference implementation (openai/baselines, ppo2), not in the paper.

    V_old, at the start of the step, and R, the targets, are constants; all are [T].
    """
    require_same_shape(values=values, old_values=old_values, returns=returns)
    old_values, returns = old_values.detach(), returns.detach()
    plain = (values - returns).square()
    bounded = (values.clamp(old_values - clip_range, old_values + clip_range) - returns).square()
    clipped = bounded > plain
    # Not torch.maximum: at a tie it takes half of the gradient from the clipped side.
    return ValueTerms(0.5 * torch.where(clipped, bounded, plain), clipped)


def explained_variance_moments(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """Sums for `explained_variance` of predictions V and targets R [T], to be added over micro-batches and ranks:
    float64 [5] = (count, ΣR, ΣR², Σ(R−V), Σ(R−V)²)."""
    require_same_shape(values=values, returns=returns, mask=mask)
    residuals = returns.double() - values.double()
    return torch.cat([local_moments(returns, mask), local_moments(residuals, mask)[1:]])


def explained_variance(moments: Tensor) -> float:
    """1 − Var[R − V] / Var[R] from all-reduced `explained_variance_moments` [5].

    1: the critic is perfect up to a constant; 0: no better than a constant; below 0: worse. 0.0 if all returns are
    equal, or with fewer than two tokens.
    """
    count, returns, returns_squared, residuals, residuals_squared = moments.double().unbind()
    variance = centred_squares(count, returns, returns_squared)
    if variance == 0:
        return 0.0
    return float(1 - centred_squares(count, residuals, residuals_squared) / variance)
