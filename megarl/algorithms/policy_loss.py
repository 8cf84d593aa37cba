"""Policy losses, per token, before aggregation."""

from typing import NamedTuple

import torch
from torch import Tensor

from megarl.algorithms.packed import require_same_shape


class PolicyTerms(NamedTuple):
    """Per-token terms of a policy loss."""

    loss: Tensor  # [T], differentiable in the log-probabilities
    clipped: Tensor  # [T] bool, a bound replaced the plain −A·r, so the token gives no gradient
    approx_kl: Tensor  # [T] old − new log-probability (k1), no gradient; exactly 0 where both are the same number


def ppo_clip(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    log_ratio_limit: float = 20.0,
) -> PolicyTerms:
    """Clipped surrogate max(−A·r, −A·clip(r, 1−clip_low, 1+clip_high)) with r = exp(logprobs − old_logprobs).

    PPO (arXiv 1707.06347, eq. 7), negated to be minimised; clip_high > clip_low is DAPO's clip-higher (arXiv
    2503.14476). `dual_clip` c bounds tokens with A < 0 by −c·A (arXiv 1912.09729, eq. 5).

    Args:
        logprobs: [T] of the policy being trained.
        old_logprobs: [T] of the policy at the start of the step; a constant.
        advantages: [T]; a constant.
        clip_low, clip_high: ≥ 0.
        dual_clip: c > 1, or None for none.
        log_ratio_limit: the log-ratio is clamped to ± this (20: a ratio of 4.9e8). Without it exp overflows, and a
            token whose ratio is infinite gets the gradient 0·inf = NaN even where the loss is clipped.

    Entries outside the response mask are computed too; leave them out with the aggregation.

    Raises:
        ValueError: shapes differ or a bound is out of range.
    """
    require_same_shape(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    if not (clip_low >= 0 and clip_high >= 0):
        raise ValueError(f"clip range must be >= 0 on both sides, got low {clip_low}, high {clip_high}")
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip must be > 1 or None, got {dual_clip}")

    old_logprobs, advantages = old_logprobs.detach(), advantages.detach()
    log_ratio = logprobs - old_logprobs
    ratio = log_ratio.clamp(-log_ratio_limit, log_ratio_limit).exp()
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    clipped = bounded > plain
    # Not torch.maximum: at a tie it would take half of its gradient from the clipped side.
    loss = torch.where(clipped, bounded, plain)
    if dual_clip is not None:
        floor = -advantages * dual_clip
        beyond = (advantages < 0) & (loss > floor)
        loss, clipped = torch.where(beyond, floor, loss), clipped | beyond
    return PolicyTerms(loss, clipped, -log_ratio.detach())
