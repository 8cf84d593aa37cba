"""PPO's clipped surrogate, with clip-higher and the dual clip."""

from megarl.algorithms.policy_loss import (
    ClipOptions,
    PolicyLoss,
    PolicyTerms,
    PolicyTokens,
    bounded_ratio,
    clipped_surrogate,
)
from megarl.deferred import torch


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


LOSSES = (PolicyLoss("ppo-clip", ppo_clip, ClipOptions()),)
