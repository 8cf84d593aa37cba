"""Losses with one ratio for each token: PPO, REINFORCE, CISPO, SAPO, FIPO, rollout-is and DPPO.

r = π_θ/π_old is the ratio to the policy at the start of the step, w = π_θ/μ that to the policy that generated.
"""

import dataclasses
import math

from megarl.algorithms.advantages import discounted_sums
from megarl.algorithms.policy_loss import (
    ClipOptions,
    ClipRange,
    PolicyTerms,
    PolicyTokens,
    bounded_ratio,
    clipped_surrogate,
    positive,
    positive_finite,
)
from megarl.deferred import Tensor, torch


def ppo_clip(tokens: PolicyTokens, clip: ClipOptions) -> PolicyTerms:
    """Clipped surrogate max(−A·r, −A·clip(r, 1−low, 1+high)) with r = exp(logprobs − old_logprobs).

    PPO (arXiv 1707.06347, eq. 7), negated to be minimised; high > low is DAPO's clip-higher (arXiv 2503.14476).
    `clip.dual` c bounds tokens with A < 0 by −c·A (arXiv 1912.09729, eq. 5).
    """
    log_ratio, advantages = tokens.logprobs - tokens.old_logprobs.detach(), tokens.advantages.detach()
    loss, clipped = clipped_surrogate(bounded_ratio(log_ratio), advantages, clip)
    if clip.dual is not None:
        floor = -advantages * clip.dual
        beyond = (advantages < 0) & (loss > floor)
        loss, clipped = torch.where(beyond, floor, loss), clipped | beyond
    return PolicyTerms(loss, clipped, -log_ratio.detach())


def reinforce(tokens: PolicyTokens, options: None) -> PolicyTerms:
    """−A·log π_θ (Williams, 1992): no ratio, no clipping. For a single update per step."""
    loss = -tokens.advantages.detach() * tokens.logprobs
    return PolicyTerms(loss, torch.zeros_like(tokens.response_mask), tokens.approx_kl)


def cispo(tokens: PolicyTokens, clip: ClipRange) -> PolicyTerms:
    """−sg[clip(r, 1−low, 1+high)]·A·log π_θ: the ratio is only a weight, so a clipped token keeps its gradient.

    CISPO of MiniMax-M1 (arXiv 2506.13585, eq. 4 and 5). The paper bounds the ratio only from above: that is low ≥ 1.
    `clipped`: the bound replaced the ratio.
    """
    log_ratio = (tokens.logprobs - tokens.old_logprobs).detach()
    ratio = bounded_ratio(log_ratio)
    weights = ratio.clamp(1 - clip.low, 1 + clip.high)
    return PolicyTerms(-weights * tokens.advantages.detach() * tokens.logprobs, weights != ratio, -log_ratio)


@dataclasses.dataclass(frozen=True)
class SapoOptions:
    """How fast the gate closes as the ratio leaves 1; the defaults are the paper's."""

    tau_positive: float = positive_finite(1.0, "τ of the gate where the advantage is above 0 (2511.20347)")
    tau_negative: float = positive_finite(1.05, "τ of the gate elsewhere (2511.20347)")


def sapo(tokens: PolicyTokens, options: SapoOptions) -> PolicyTerms:
    """−A·σ(τ·(r − 1))·4/τ: a soft gate instead of the clip; `clipped` is always False.

    SAPO (arXiv 2511.20347). τ is `tau_positive` where A > 0, else `tau_negative`. At r = 1 the gradient is that of
    −A·r.
    """
    log_ratio, advantages = tokens.logprobs - tokens.old_logprobs.detach(), tokens.advantages.detach()
    ratio = bounded_ratio(log_ratio)
    above, below = (ratio.new_full((), tau) for tau in (options.tau_positive, options.tau_negative))
    tau = torch.where(advantages > 0, above, below)
    # Not torch.sigmoid: on a CPU its rounding depends on the token's position in the batch. r ≥ 0, so exp is ≤ exp(τ).
    gate = 4 / (tau * (1 + torch.exp(-tau * (ratio - 1))))
    loss = -advantages * gate
    return PolicyTerms(loss, torch.zeros_like(tokens.response_mask), -log_ratio.detach())


@dataclasses.dataclass(frozen=True)
class FipoOptions(ClipOptions):
    """PPO's clip range, and the influence of later tokens."""

    half_life: float = positive(32.0, "tokens after which the influence of a later token has halved (2603.19835)")
    range: float = positive(0.2, "ε: the influence is held in [1, 1 + ε] (2603.19835)")


def fipo(tokens: PolicyTokens, options: FipoOptions) -> PolicyTerms:
    """`ppo_clip` with the advantage A·sg[clip(exp(Σ_{k≥t} γ^{k−t}·log r_k), 1, 1 + ε)], γ = 2^{−1/half-life}.

    A token's advantage is scaled by how the policy has moved on the tokens after it: FIPO (arXiv 2603.19835). The sum
    is over the response's own tokens, observations skipped. With `--dual-clip` c, tokens whose ratio is above c are
    left out of it, as in the paper's code.
    """
    log_ratio = (tokens.logprobs - tokens.old_logprobs).detach().double()
    if options.dual is not None:
        log_ratio = log_ratio.masked_fill(log_ratio > math.log(options.dual), 0.0)
    factor = 2.0 ** (-1.0 / options.half_life)
    later = discounted_sums(log_ratio, tokens.response_mask, tokens.cu_seqlens, factor)
    influence = later.clamp(0.0, math.log1p(options.range)).exp().to(tokens.logprobs.dtype)
    return ppo_clip(dataclasses.replace(tokens, advantages=tokens.advantages.detach() * influence), options)


def rollout_is(tokens: PolicyTokens, clip: ClipRange) -> PolicyTerms:
    """−sg[w]·A·log π_θ with w = π_θ/μ where 1 − low < w < 1 + high, else 0 (GLM-5, arXiv 2602.15763, §4.1.2).

    μ is the policy that generated; π_old is not read. `clipped`: masked.
    """
    ratio = bounded_ratio((tokens.logprobs - tokens.behaviour_logprobs).detach())
    is_kept = (ratio > 1 - clip.low) & (ratio < 1 + clip.high)
    return _weighted_where_kept(tokens, ratio, is_kept)


@dataclasses.dataclass(frozen=True)
class DppoTvOptions:
    """Bounds of π_θ − μ. The defaults of both kinds are those of verl's example by the paper's authors."""

    low: float = positive(0.15, "δ: by how much a token's probability may fall below the rollout's (2602.04879)")
    high: float | None = positive(None, "by how much it may rise above; default: as --dppo-tv-low")
    cap: float = positive(20.0, "largest weight π_θ/μ (2602.04879 §5.4)")

    def __post_init__(self):
        if self.high is None:
            object.__setattr__(self, "high", self.low)


@dataclasses.dataclass(frozen=True)
class DppoKlOptions(DppoTvOptions):
    """Bounds of the binary KL."""

    low: float = positive(0.05, "δ: largest binary KL from the rollout of a token whose probability falls (2602.04879)")
    high: float | None = positive(None, "the same where it rises; default: as --dppo-kl-low")


def dppo_tv(tokens: PolicyTokens, options: DppoTvOptions) -> PolicyTerms:
    """−A·sg[min(π_θ/μ, cap)]·log π_θ where |π_θ(token) − μ(token)| allows it, else 0.

    DPPO with the binary total variation (arXiv 2602.04879): a trust region of probabilities instead of ratios. A token
    with A > 0 is kept iff π_θ − μ ≤ high, one with A < 0 iff π_θ − μ ≥ −low: a rare token may multiply its
    probability, a likely one not fall far. `clipped`: not kept.
    """
    rise = _probability(tokens.logprobs) - _probability(tokens.behaviour_logprobs)
    return _dppo(tokens, torch.where(tokens.advantages > 0, rise <= options.high, rise >= -options.low), options.cap)


def dppo_kl(tokens: PolicyTokens, options: DppoKlOptions) -> PolicyTerms:
    """As `dppo_tv`, but a token is kept iff the binary KL is within the bound, or the step leads back towards μ.

    D = μ·log(μ/π_θ) + (1 − μ)·log((1 − μ)/(1 − π_θ)) of the token against all others. With A > 0 kept iff D ≤ high or
    π_θ ≤ μ, with A < 0 iff D ≤ low or π_θ ≥ μ.
    """
    rise = _probability(tokens.logprobs) - _probability(tokens.behaviour_logprobs)
    divergence = binary_kl(tokens.behaviour_logprobs.detach().double(), tokens.logprobs.detach().double())
    upwards = (divergence <= options.high) | (rise <= 0)
    downwards = (divergence <= options.low) | (rise >= 0)
    return _dppo(tokens, torch.where(tokens.advantages > 0, upwards, downwards), options.cap)


def binary_kl(logprobs: Tensor, others: Tensor) -> Tensor:
    """KL between the coins with these log-probabilities of heads; exactly 0 where they are equal, inf where only the
    second one is certain. Log-probabilities that rounding put above 0 count as 0."""
    logprobs, others = logprobs.clamp(max=0), others.clamp(max=0)
    tails = -torch.expm1(logprobs)
    of_tails = tails * (tails.log() - (-torch.expm1(others)).log())
    return logprobs.exp() * (logprobs - others) + torch.where(tails > 0, of_tails, 0.0)


def _probability(logprobs: Tensor) -> Tensor:
    return logprobs.detach().double().exp()


def _dppo(tokens: PolicyTokens, is_kept: Tensor, cap: float) -> PolicyTerms:
    ratio = bounded_ratio((tokens.logprobs - tokens.behaviour_logprobs).detach()).clamp(max=cap)
    return _weighted_where_kept(tokens, ratio, is_kept)


def _weighted_where_kept(tokens: PolicyTokens, weights: Tensor, is_kept: Tensor) -> PolicyTerms:
    """−weights·A·log π_θ at the tokens that are kept, 0 at the others, which count as clipped."""
    weights = torch.where(is_kept, weights, 0.0)
    return PolicyTerms(-weights * tokens.advantages.detach() * tokens.logprobs, ~is_kept, tokens.approx_kl)
