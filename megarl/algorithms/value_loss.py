"""The critic's loss, per token, before aggregation."""

from typing import NamedTuple

from megarl.algorithms.packed import require_same_shape
from megarl.deferred import Tensor, torch


class ValueTerms(NamedTuple):
    """Per-token terms of the value loss."""

    loss: Tensor  # [T], differentiable in the values
    clipped: Tensor  # [T] bool, the clipped value has the larger error, so the token has no gradient


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip_range: float) -> ValueTerms:
    """½·max((V − R)², (clip(V, V_old − ε, V_old + ε) − R)²).

    The value clipping of the PPO reference implementation (openai/baselines, ppo2), not in the paper.

    Args:
        values: [T] V of the critic being trained.
        old_values: [T] V at the start of the step; a constant.
        returns: [T] targets R; a constant.
        clip_range: ε ≥ 0.

    Raises:
        ValueError: shapes differ.
    """
    require_same_shape(values=values, old_values=old_values, returns=returns)
    old_values, returns = old_values.detach(), returns.detach()
    plain = (values - returns).square()
    bounded = (values.clamp(old_values - clip_range, old_values + clip_range) - returns).square()
    clipped = bounded > plain
    # Not torch.maximum: at a tie it takes half of the gradient from the clipped side.
    return ValueTerms(0.5 * torch.where(clipped, bounded, plain), clipped)
