"""GMPO: the geometric mean of a response's clipped ratios."""

from megarl.algorithms.policy_loss import (
    LOG_RATIO_LIMIT,
    ClipRange,
    PolicyLoss,
    PolicyTerms,
    PolicyTokens,
    on_tokens,
    response_mean,
)
from megarl.deferred import torch


def gmpo(tokens: PolicyTokens, clip: ClipRange) -> PolicyTerms:
    """−A·exp(mean over the response of clipped log r): the geometric mean of the clipped ratios.

    GMPO (arXiv 2507.20673). Each token is clipped in log space, on the side of its advantage's sign: log r ≤ high
    where A_t > 0, log r ≥ −low where A_t < 0 (0.4 on both sides in the paper); a token with A_t = 0 has ratio 1. A is
    the mean of the A_t: the paper has one advantage per response. The loss is repeated on each token of the response,
    so `seq-mean-token-mean` gives the paper's objective.
    """
    log_ratio, advantages = tokens.logprobs - tokens.old_logprobs.detach(), tokens.advantages.detach()
    bounded = torch.where(advantages > 0, log_ratio.clamp(max=clip.high), log_ratio.clamp(min=-clip.low))
    bounded = torch.where(advantages == 0, torch.zeros_like(bounded), bounded)
    ratio = response_mean(bounded, tokens).clamp(max=LOG_RATIO_LIMIT).exp()
    loss = -response_mean(advantages, tokens) * ratio
    clipped = (advantages != 0) & (bounded != log_ratio)
    return PolicyTerms(on_tokens(loss, tokens), clipped, -log_ratio.detach())


LOSSES = (PolicyLoss("gmpo", gmpo, ClipRange()),)
