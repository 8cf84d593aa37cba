"""SAPO: a soft gate on the ratio instead of the clip."""

import dataclasses

from megarl.algorithms.policy_loss import PolicyLoss, PolicyTerms, PolicyTokens, bounded_ratio, positive_finite
from megarl.deferred import torch


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


LOSSES = (PolicyLoss("sapo", sapo, SapoOptions()),)
