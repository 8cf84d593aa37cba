"""GMPO: the geometric mean of a response's clipped ratios."""

import torch

from megarl.algorithms.policy_loss import (
    ClipRange,
    PolicyLoss,
    PolicyTerms,
    PolicyTokens,
    on_tokens,
    response_mean,
)


def gmpo(tokens: PolicyTokens, clip: ClipRange, log_ratio_limit: float = 20.0) -> PolicyTerms:
    """−A·exp(mean over the response of clipped log r): the geometric mean of the clipped ratios.

    GMPO (arXiv 2507.20673). Each token is clipped on the side that its advantage's sign pulls to, and in log
    space: log r ≤ high where A_t > 0, log r ≥ −low where A_t < 0 (the paper has 0.4 on both sides); a token with
    A_t = 0 counts as a ratio of 1. A is the mean of the A_t: the paper has one advantage a response. The loss stands
    on each token of the response, so `seq-mean-token-mean` gives the paper's objective.

    Args:
        log_ratio_limit: the mean of log r is held to at most this, else exp overflows where A < 0.
    """
    log_ratio, advantages = tokens.logprobs - tokens.old_logprobs.detach(), tokens.advantages.detach()
    held = torch.where(advantages > 0, log_ratio.clamp(max=clip.high), log_ratio.clamp(min=-clip.low))
    held = torch.where(advantages == 0, torch.zeros_like(held), held)
    ratio = response_mean(held, tokens).clamp(max=log_ratio_limit).exp()
    loss = -response_mean(advantages, tokens) * ratio
    clipped = (advantages != 0) & (held != log_ratio)
    return PolicyTerms(on_tokens(loss, tokens), clipped, -log_ratio.detach())


LOSSES = (PolicyLoss("gmpo", gmpo, ClipRange()),)
