"""REINFORCE: the plain policy gradient."""

from megarl.algorithms.policy_loss import NoOptions, PolicyLoss, PolicyTerms, PolicyTokens
from megarl.deferred import torch


def reinforce(tokens: PolicyTokens, options: NoOptions) -> PolicyTerms:
    """−A·log π_θ (Williams, 1992): no ratio, no clipping. For a single update per step."""
    loss = -tokens.advantages.detach() * tokens.logprobs
    return PolicyTerms(loss, torch.zeros_like(tokens.response_mask), tokens.approx_kl)


LOSSES = (PolicyLoss("reinforce", reinforce, NoOptions()),)
