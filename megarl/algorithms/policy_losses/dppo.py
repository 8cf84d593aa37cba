"""DPPO: a trust region of probabilities instead of ratios, around the policy that generated."""

import dataclasses

from megarl.algorithms.policy_loss import PolicyLoss, PolicyTerms, PolicyTokens, bounded_ratio, positive
from megarl.deferred import Tensor, torch


@dataclasses.dataclass(frozen=True)
class TvOptions:
    """Bounds of π_θ − μ. The defaults of both kinds are those of verl's example by the paper's authors."""

    low: float = positive(0.15, "δ: by how much a token's probability may fall below the rollout's (2602.04879)")
    high: float | None = positive(None, "by how much it may rise above; default: as --dppo-tv-low")
    cap: float = positive(20.0, "largest weight π_θ/μ (2602.04879 §5.4)")

    def __post_init__(self):
        if self.high is None:
            object.__setattr__(self, "high", self.low)


@dataclasses.dataclass(frozen=True)
class KlOptions(TvOptions):
    """Bounds of the binary KL."""

    low: float = positive(0.05, "δ: largest binary KL from the rollout of a token whose probability falls (2602.04879)")
    high: float | None = positive(None, "the same where it rises; default: as --dppo-kl-low")


def dppo_tv(tokens: PolicyTokens, options: TvOptions) -> PolicyTerms:
    """−A·sg[min(π_θ/μ, cap)]·log π_θ where |π_θ(token) − μ(token)| allows it, else 0.

    DPPO with the binary total variation (arXiv 2602.04879). A token with A > 0 is kept iff π_θ − μ ≤ high, one with
    A < 0 iff π_θ − μ ≥ −low: a rare token may multiply its probability, a likely one not fall far. `clipped`: not kept.
    """
    rise = _probability(tokens.logprobs) - _probability(tokens.behaviour_logprobs)
    return _terms(tokens, torch.where(tokens.advantages > 0, rise <= options.high, rise >= -options.low), options.cap)


def dppo_kl(tokens: PolicyTokens, options: KlOptions) -> PolicyTerms:
    """As `dppo_tv`, but a token is kept iff the binary KL is within the bound, or the step leads back towards μ.

    D = μ·log(μ/π_θ) + (1 − μ)·log((1 − μ)/(1 − π_θ)) of the token against all others. With A > 0 kept iff D ≤ high or
    π_θ ≤ μ, with A < 0 iff D ≤ low or π_θ ≥ μ.
    """
    rise = _probability(tokens.logprobs) - _probability(tokens.behaviour_logprobs)
    divergence = binary_kl(tokens.behaviour_logprobs.detach().double(), tokens.logprobs.detach().double())
    upwards = (divergence <= options.high) | (rise <= 0)
    downwards = (divergence <= options.low) | (rise >= 0)
    return _terms(tokens, torch.where(tokens.advantages > 0, upwards, downwards), options.cap)


def binary_kl(logprobs: Tensor, others: Tensor) -> Tensor:
    """KL between the coins with these log-probabilities of heads; exactly 0 where they are equal, inf where only the
    second one is certain. Log-probabilities that rounding put above 0 count as 0."""
    logprobs, others = logprobs.clamp(max=0), others.clamp(max=0)
    tails = -torch.expm1(logprobs)
    of_tails = tails * (tails.log() - (-torch.expm1(others)).log())
    return logprobs.exp() * (logprobs - others) + torch.where(tails > 0, of_tails, 0.0)


def _probability(logprobs: Tensor) -> Tensor:
    return logprobs.detach().double().exp()


def _terms(tokens: PolicyTokens, is_kept: Tensor, cap: float) -> PolicyTerms:
    ratio = bounded_ratio((tokens.logprobs - tokens.behaviour_logprobs).detach()).clamp(max=cap)
    weights = torch.where(is_kept, ratio, 0.0)
    return PolicyTerms(-weights * tokens.advantages.detach() * tokens.logprobs, ~is_kept, tokens.approx_kl)


LOSSES = (
    PolicyLoss("dppo-tv", dppo_tv, TvOptions(), reads_rollout=True),
    PolicyLoss("dppo-kl", dppo_kl, KlOptions(), reads_rollout=True),
)
