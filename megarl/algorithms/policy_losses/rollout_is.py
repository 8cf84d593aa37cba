"""Importance weights between the trained policy and the one that generated, with tokens outside both bounds masked."""

from megarl.algorithms.policy_loss import ClipRange, PolicyLoss, PolicyTerms, PolicyTokens, bounded_ratio
from megarl.deferred import torch


def rollout_is(tokens: PolicyTokens, clip: ClipRange) -> PolicyTerms:
    """−sg[w]·A·log π_θ with w = π_θ/μ where 1 − low < w < 1 + high, else 0 (GLM-5, arXiv 2602.15763, §4.1.2).

    μ is the policy that generated; π_old is not read. `clipped`: masked.
    """
    ratio = bounded_ratio((tokens.logprobs - tokens.behaviour_logprobs).detach())
    is_kept = (ratio > 1 - clip.low) & (ratio < 1 + clip.high)
    weights = torch.where(is_kept, ratio, 0.0)
    return PolicyTerms(-weights * tokens.advantages.detach() * tokens.logprobs, ~is_kept, tokens.approx_kl)


LOSSES = (PolicyLoss("rollout-is", rollout_is, ClipRange(), reads_rollout=True),)
