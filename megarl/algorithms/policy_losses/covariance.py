"""Clip-Cov and KL-Cov: the few tokens that lower the entropy most are not learnt, or held back."""

import dataclasses

from megarl.algorithms.policy_loss import (
    LOG_RATIO_LIMIT,
    ClipOptions,
    PolicyLoss,
    PolicyTerms,
    PolicyTokens,
    bounded_ratio,
    option,
    positive,
    without_selected,
)
from megarl.algorithms.policy_losses.ppo_clip import ppo_clip
from megarl.algorithms.token_selection import (
    MinibatchTokens,
    covariances,
    lowest_that_fit,
    random_keys,
    sort_keys,
)
from megarl.deferred import Tensor, torch


def _share(default: float, text: str):
    return option(default, text, lambda value: 0 < value <= 1, "above 0, at most 1")


@dataclasses.dataclass(frozen=True)
class ClipCovOptions(ClipOptions):
    """PPO's clip range, and which tokens are left out."""

    share: float = _share(0.0002, "share of a mini-batch's tokens that are not learnt, at least one (2505.22617)")
    least: float = option(1.0, "covariance above which a token may be left out (2505.22617)")
    most: float = option(5.0, "covariance below which a token may be left out (2505.22617)")


@dataclasses.dataclass(frozen=True)
class KlCovOptions:
    """Which tokens are held back, and how much."""

    share: float = _share(0.0002, "share of a mini-batch's tokens that are held back, at least one (2505.22617)")
    coefficient: float = positive(1.0, "weight of |log r| at these tokens (2505.22617)")


def clip_cov(tokens: PolicyTokens, options: ClipCovOptions) -> PolicyTerms:
    """`ppo_clip`, 0 at the selected tokens, which still count in denominators; `clipped` also there.

    Clip-Cov (arXiv 2505.22617, §4.2).
    """
    return without_selected(ppo_clip(tokens, options), tokens)


def select_at_random(tokens: MinibatchTokens, options: ClipCovOptions) -> Tensor:
    """[T] bool: a random share of the mini-batch's tokens, of those whose covariance is between the bounds."""
    covariance, number = covariances(tokens)
    can_be = tokens.mask & (covariance > options.least) & (covariance < options.most)
    count = (options.share * number).floor().clamp(min=1)
    keys = random_keys(tokens.uniforms)
    return lowest_that_fit(keys, torch.zeros_like(covariance), can_be, lambda n, _: n <= count, tokens.total)


def kl_cov(tokens: PolicyTokens, options: KlCovOptions) -> PolicyTerms:
    """−A·r, plus coefficient·|log r| at the selected tokens; nothing is clipped. KL-Cov (arXiv 2505.22617, §4.2)."""
    log_ratio = tokens.logprobs - tokens.old_logprobs.detach()
    loss = -tokens.advantages.detach() * bounded_ratio(log_ratio)
    if tokens.selected is not None:
        held = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).abs()
        loss = loss + options.coefficient * torch.where(tokens.selected, held, 0.0)
    return PolicyTerms(loss, torch.zeros_like(tokens.response_mask), -log_ratio.detach())


def select_largest(tokens: MinibatchTokens, options: KlCovOptions) -> Tensor:
    """[T] bool: the share of the mini-batch's tokens with the largest covariance."""
    covariance, number = covariances(tokens)
    rest = number - (options.share * number).floor().clamp(min=1)
    keys = sort_keys(covariance, tokens.uniforms)
    nothing = torch.zeros_like(covariance)
    others = lowest_that_fit(keys, nothing, tokens.mask, lambda n, _: n <= rest.clamp(min=0), tokens.total)
    return tokens.mask & ~others


LOSSES = (
    PolicyLoss("clip-cov", clip_cov, ClipCovOptions(), select=select_at_random),
    PolicyLoss("kl-cov", kl_cov, KlCovOptions(), select=select_largest),
)
