"""CISPO: the clipped ratio as a weight without gradient."""

from megarl.algorithms.policy_loss import ClipRange, PolicyLoss, PolicyTerms, PolicyTokens, bounded_ratio


def cispo(tokens: PolicyTokens, clip: ClipRange) -> PolicyTerms:
    """−sg[clip(r, 1−low, 1+high)]·A·log π_θ: the ratio is only a weight, so a clipped token keeps its gradient.

    CISPO of MiniMax-M1 (arXiv 2506.13585, eq. 4 and 5). The paper bounds the ratio only from above: that is low ≥ 1.
    `clipped`: the bound replaced the ratio.
    """
    log_ratio = (tokens.logprobs - tokens.old_logprobs).detach()
    ratio = bounded_ratio(log_ratio)
    weights = ratio.clamp(1 - clip.low, 1 + clip.high)
    return PolicyTerms(-weights * tokens.advantages.detach() * tokens.logprobs, weights != ratio, -log_ratio)


LOSSES = (PolicyLoss("cispo", cispo, ClipRange()),)
