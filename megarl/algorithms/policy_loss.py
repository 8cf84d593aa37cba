"""Policy losses of single tokens, before aggregation, and what every policy loss takes and gives."""

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from megarl.algorithms.packed import require_same_shape


@dataclasses.dataclass(frozen=True)
class PolicyTokens:
    """A packed batch of N whole sequences, T tokens, as a policy loss sees it. ValueError when shapes differ."""

    logprobs: Tensor  # [T] log π_θ of the policy being trained; the only field that a gradient flows to
    old_logprobs: Tensor  # [T] log π_old of the policy at the start of the step
    advantages: Tensor  # [T]
    response_mask: Tensor  # [T] bool, True where the policy wrote the token
    cu_seqlens: Tensor  # [N+1]

    def __post_init__(self):
        require_same_shape(
            logprobs=self.logprobs,
            old_logprobs=self.old_logprobs,
            advantages=self.advantages,
            response_mask=self.response_mask,
        )


@dataclasses.dataclass(frozen=True)
class ClipOptions:
    """How far a policy loss lets the ratio go; each loss says what it reads. ValueError for a bound out of range."""

    low: float  # ε_low ≥ 0
    high: float  # ε_high ≥ 0
    dual: float | None = None  # c > 1, or None for none

    def __post_init__(self):
        if not (self.low >= 0 and self.high >= 0):
            raise ValueError(f"clip range must be >= 0 on both sides, got low {self.low}, high {self.high}")
        if self.dual is not None and not self.dual > 1:
            raise ValueError(f"dual_clip must be > 1 or None, got {self.dual}")


class PolicyTerms(NamedTuple):
    """Per-token terms of a policy loss. Entries outside the response mask mean nothing: the aggregation skips them."""

    loss: Tensor  # [T], differentiable in the log-probabilities; a sequence's loss stands on each of its tokens
    clipped: Tensor  # [T] bool, a bound took the place of the ratio; but for cispo the token gives no gradient then
    approx_kl: Tensor  # [T] old − new log-probability (k1), no gradient; exactly 0 where both are the same number


def ppo_clip(tokens: PolicyTokens, clip: ClipOptions, log_ratio_limit: float = 20.0) -> PolicyTerms:
    """Clipped surrogate max(−A·r, −A·clip(r, 1−low, 1+high)) with r = exp(logprobs − old_logprobs).

    PPO (arXiv 1707.06347, eq. 7), negated to be minimised; high > low is DAPO's clip-higher (arXiv 2503.14476).
    `clip.dual` c bounds tokens with A < 0 by −c·A (arXiv 1912.09729, eq. 5).

    Args:
        log_ratio_limit: the log-ratio is clamped to ± this (20: a ratio of 4.9e8). Without it exp overflows, and a
            token whose ratio is infinite gets the gradient 0·inf = NaN even where the loss is clipped.
    """
    log_ratio, advantages = tokens.logprobs - tokens.old_logprobs.detach(), tokens.advantages.detach()
    ratio = log_ratio.clamp(-log_ratio_limit, log_ratio_limit).exp()
    loss, clipped = clipped_surrogate(ratio, advantages, clip)
    if clip.dual is not None:
        floor = -advantages * clip.dual
        beyond = (advantages < 0) & (loss > floor)
        loss, clipped = torch.where(beyond, floor, loss), clipped | beyond
    return PolicyTerms(loss, clipped, -log_ratio.detach())


def clipped_surrogate(ratio: Tensor, advantages: Tensor, clip: ClipOptions) -> tuple[Tensor, Tensor]:
    """max(−A·r, −A·clip(r, 1−low, 1+high)), and where (bool) the second one is the larger. Any one shape."""
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - clip.low, 1 + clip.high)
    clipped = bounded > plain
    # Not torch.maximum: at a tie it would take half of its gradient from the clipped side.
    return torch.where(clipped, bounded, plain), clipped


def cispo(tokens: PolicyTokens, clip: ClipOptions, log_ratio_limit: float = 20.0) -> PolicyTerms:
    """−sg[clip(r, 1−low, 1+high)]·A·log π_θ: the ratio only weighs, so a clipped token still gives its gradient.

    CISPO of MiniMax-M1 (arXiv 2506.13585, eq. 4 and 5). The paper bounds the ratio above alone: that is low ≥ 1.
    `clipped` says where the bound replaced the ratio. `log_ratio_limit` as in `ppo_clip`.
    """
    log_ratio = (tokens.logprobs - tokens.old_logprobs).detach()
    ratio = log_ratio.clamp(-log_ratio_limit, log_ratio_limit).exp()
    weights = ratio.clamp(1 - clip.low, 1 + clip.high)
    return PolicyTerms(-weights * tokens.advantages.detach() * tokens.logprobs, weights != ratio, -log_ratio)


def reinforce(tokens: PolicyTokens, clip: ClipOptions) -> PolicyTerms:
    """−A·log π_θ (Williams, 1992): no ratio, nothing clipped, `clip` is not read. Right for a single update a step."""
    loss = -tokens.advantages.detach() * tokens.logprobs
    approx_kl = (tokens.old_logprobs - tokens.logprobs).detach()
    return PolicyTerms(loss, torch.zeros_like(tokens.response_mask), approx_kl)


def sapo(
    tokens: PolicyTokens,
    clip: ClipOptions,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
    log_ratio_limit: float = 20.0,
) -> PolicyTerms:
    """−A·σ(τ·(r − 1))·4/τ: a soft gate in place of the clip; `clip` is not read and nothing counts as clipped.

    SAPO (arXiv 2511.20347). τ is `tau_positive` where A > 0, else `tau_negative`, both > 0; the defaults are the
    paper's. At r = 1 the gradient is that of −A·r. `log_ratio_limit` as in `ppo_clip`.
    """
    log_ratio, advantages = tokens.logprobs - tokens.old_logprobs.detach(), tokens.advantages.detach()
    ratio = log_ratio.clamp(-log_ratio_limit, log_ratio_limit).exp()
    tau = torch.where(advantages > 0, ratio.new_full((), tau_positive), ratio.new_full((), tau_negative))
    # Not torch.sigmoid: on a CPU its bits depend on where in the batch a token stands. r ≥ 0, so exp is ≤ exp(τ).
    gate = 4 / (tau * (1 + torch.exp(-tau * (ratio - 1))))
    loss = -advantages * gate
    return PolicyTerms(loss, torch.zeros_like(tokens.response_mask), -log_ratio.detach())
