"""M2PO: tokens that the policy has moved on most since their rollout are masked, as few as a second moment allows."""

import dataclasses

from megarl.algorithms.policy_loss import ClipOptions, PolicyLoss, PolicyTerms, PolicyTokens, positive, without_selected
from megarl.algorithms.policy_losses.ppo_clip import ppo_clip
from megarl.algorithms.token_selection import MinibatchTokens, lowest_that_fit, sort_keys
from megarl.deferred import Tensor, torch


@dataclasses.dataclass(frozen=True)
class M2poOptions(ClipOptions):
    """PPO's clip range, and the bound of the second moment: that of the authors' scripts (Infini-AI-Lab/M2PO)."""

    threshold: float = positive(0.04, "τ: mean of (log π_old/μ)² below which the tokens that are left are (2510.01161)")


def m2po(tokens: PolicyTokens, options: M2poOptions) -> PolicyTerms:
    """`ppo_clip`, 0 at the selected tokens, which still count in denominators. M2PO (arXiv 2510.01161, §3).

    `clipped`: also where selected.
    """
    return without_selected(ppo_clip(tokens, options), tokens)


def select(tokens: MinibatchTokens, options: M2poOptions) -> Tensor:
    """[T] bool: the fewest tokens with the largest (log π_old − log μ)² without which its mean is below τ."""
    squares = (tokens.logprobs.double() - tokens.rollout_logprobs.double()).square()

    def fits(number: Tensor, total: Tensor) -> Tensor:
        return (total < options.threshold * number) | (number == 0)

    squares = torch.where(tokens.mask, squares, 0.0)
    kept = lowest_that_fit(sort_keys(squares, tokens.uniforms), squares, tokens.mask, fits, tokens.total)
    return tokens.mask & ~kept


LOSSES = (PolicyLoss("m2po", m2po, M2poOptions(), select=select),)
