"""TOPR: responses with an advantage below 0 have a truncated importance weight, the others none."""

import dataclasses

from megarl.algorithms.policy_loss import PolicyLoss, PolicyTerms, PolicyTokens, positive, response_log_ratio
from megarl.deferred import torch


@dataclasses.dataclass(frozen=True)
class ToprOptions:
    """The bound of the weight."""

    cap: float = positive(1.0, "largest importance weight of a response with an advantage below 0 (2503.14286)")


def topr(tokens: PolicyTokens, options: ToprOptions) -> PolicyTerms:
    """−A·log π_θ where A ≥ 0; −sg[min(W, cap)]·A·log π_θ where A < 0, W = Π π_θ/μ over the response.

    TOPR (arXiv 2503.14286): a response that became unlikely is not pushed down further, without any KL. The aggregation
    of the paper's objective is `seq-mean-token-sum`. `clipped`: the cap replaced W.
    """
    advantages = tokens.advantages.detach()
    weight = response_log_ratio((tokens.logprobs - tokens.behaviour_logprobs).detach(), tokens).exp()
    is_negative = advantages < 0
    weights = torch.where(is_negative, weight.clamp(max=options.cap), 1.0).to(tokens.logprobs.dtype)
    return PolicyTerms(-weights * advantages * tokens.logprobs, is_negative & (weight > options.cap), tokens.approx_kl)


LOSSES = (PolicyLoss("topr", topr, ToprOptions(), reads_rollout=True),)
