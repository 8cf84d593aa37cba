"""Losses that treat a few tokens of a mini-batch apart, and how these are found: M2PO, Clip-Cov and KL-Cov.

Such tokens cannot be chosen in a micro-batch: the choice would depend on the layout. So they are chosen before the
update, from what is known then, by sums over ranks: a radix search finds the place at which the
sorted tokens of all ranks are cut, without gathering them, in eight sums of 512 numbers.
"""

import dataclasses
from collections.abc import Callable

from megarl.algorithms.policy_loss import (
    LOG_RATIO_LIMIT,
    ClipOptions,
    PolicyTerms,
    PolicyTokens,
    bounded_ratio,
    option,
    positive,
)
from megarl.algorithms.policy_losses.single_tokens import ppo_clip
from megarl.deferred import Tensor, torch

_DIGIT = 8  # bits that a round of the search finds
_TIE_BITS = 31


def _share(default: float, text: str):
    return option(default, text, lambda value: 0 < value <= 1, "above 0, at most 1")


@dataclasses.dataclass(frozen=True)
class M2poOptions(ClipOptions):
    """PPO's clip range, and the bound of the second moment: that of the authors' scripts (Infini-AI-Lab/M2PO)."""

    threshold: float = positive(0.04, "τ: mean of (log π_old/μ)² below which the tokens that are left are (2510.01161)")


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


def masked_ppo_clip(tokens: PolicyTokens, options: ClipOptions) -> PolicyTerms:
    """`ppo_clip`, 0 at the selected tokens, which still count in denominators; `clipped` also there.

    M2PO (arXiv 2510.01161, §3) and Clip-Cov (arXiv 2505.22617, §4.2), which select by their own rules.
    """
    terms = ppo_clip(tokens, options)
    if tokens.selected is None:
        return terms
    loss = torch.where(tokens.selected, 0.0, terms.loss)
    return terms._replace(loss=loss, clipped=terms.clipped | tokens.selected)


def kl_cov(tokens: PolicyTokens, options: KlCovOptions) -> PolicyTerms:
    """−A·r, plus coefficient·|log r| at the selected tokens; nothing is clipped. KL-Cov (arXiv 2505.22617, §4.2)."""
    log_ratio = tokens.logprobs - tokens.old_logprobs.detach()
    loss = -tokens.advantages.detach() * bounded_ratio(log_ratio)
    if tokens.selected is not None:
        held = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).abs()
        loss = loss + options.coefficient * torch.where(tokens.selected, held, 0.0)
    return PolicyTerms(loss, torch.zeros_like(tokens.response_mask), -log_ratio.detach())


def farthest_from_rollout(tokens: PolicyTokens, options: M2poOptions, uniforms: Tensor, total: Callable) -> Tensor:
    """[T] bool: the fewest tokens with the largest (log π_old − log μ)² without which its mean is below τ."""
    mask, squares = tokens.response_mask, (tokens.old_logprobs.double() - tokens.rollout_logprobs.double()).square()

    def fits(number: Tensor, sums: Tensor) -> Tensor:
        return (sums < options.threshold * number) | (number == 0)

    squares = torch.where(mask, squares, 0.0)
    return mask & ~lowest_that_fit(sort_keys(squares, uniforms), squares, mask, fits, total)


def random_by_covariance(tokens: PolicyTokens, options: ClipCovOptions, uniforms: Tensor, total: Callable) -> Tensor:
    """[T] bool: a random share of the mini-batch's tokens, of those whose covariance is between the bounds."""
    covariance, number = covariances(tokens, total)
    can_be = tokens.response_mask & (covariance > options.least) & (covariance < options.most)
    count = (options.share * number).floor().clamp(min=1)
    keys = random_keys(uniforms)
    return lowest_that_fit(keys, torch.zeros_like(covariance), can_be, lambda n, _: n <= count, total)


def largest_covariance(tokens: PolicyTokens, options: KlCovOptions, uniforms: Tensor, total: Callable) -> Tensor:
    """[T] bool: the share of the mini-batch's tokens with the largest covariance."""
    (covariance, number), mask = covariances(tokens, total), tokens.response_mask
    rest = number - (options.share * number).floor().clamp(min=1)
    keys, nothing = sort_keys(covariance, uniforms), torch.zeros_like(covariance)
    return mask & ~lowest_that_fit(keys, nothing, mask, lambda n, _: n <= rest.clamp(min=0), total)


def covariances(tokens: PolicyTokens, total: Callable) -> tuple[Tensor, Tensor]:
    """(c, n): [T] float64 each token's share c = (A − mean A)·(log π − mean log π) of their covariance, with means over
    the n tokens of the mini-batch. Tokens with a large share lower the entropy most (arXiv 2505.22617, eq. 10, with
    π_old for π)."""
    mask = tokens.response_mask
    columns = [torch.where(mask, x.double(), 0.0) for x in (tokens.advantages, tokens.old_logprobs)]
    sums = total(torch.stack([mask.sum().double(), *(column.sum() for column in columns)]))
    means = sums[1:] / sums[0].clamp(min=1)
    advantages, logprobs = (column - mean for column, mean in zip(columns, means, strict=True))
    return advantages * logprobs, sums[0]


def lowest_that_fit(
    keys: Tensor, values: Tensor, mask: Tensor, fits: Callable[[Tensor, Tensor], Tensor], total: Callable
) -> Tensor:
    """[T] bool: the most tokens, in ascending order of their keys, whose number and sum of values fit.

    Args:
        keys: [T] int64 in [0, 2^63); tokens with equal keys stay together.
        values: [T] float64.
        mask: [T] bool, the tokens to choose from.
        fits: (numbers, sums), both [n] float64, of the tokens up to n places in that order -> [n] bool; true for no
            tokens, and false after it was false once.
        total: sums over the ranks.
    """
    below, prefix = values.new_zeros(2, 1, dtype=torch.float64), keys.new_zeros(())
    are_all = torch.zeros((), dtype=torch.bool, device=keys.device)
    counted = torch.stack([mask.double(), torch.where(mask, values, 0.0)])
    for shift in range(64 - _DIGIT, -1, -_DIGIT):
        is_top = shift == 64 - _DIGIT
        inside = mask if is_top else (keys >> (shift + _DIGIT)) == prefix
        digits = (keys >> shift) & (2**_DIGIT - 1)
        bins = below.new_zeros(2, 2**_DIGIT).index_add_(1, digits, counted * inside)
        reached = below + total(bins).cumsum(1)
        number = fits(reached[0], reached[1]).long().cumprod(0).sum()
        if is_top:
            are_all, number = number == 2**_DIGIT, number.clamp(max=2 ** (_DIGIT - 1) - 1)
        before = torch.cat([below, reached], dim=1)
        below, prefix = before.index_select(1, number.view(1)), (prefix << _DIGIT) + number
    return mask & (are_all | (keys < prefix))


def sort_keys(values: Tensor, uniforms: Tensor) -> Tensor:
    """[T] int64 keys in the order of the values, as float32; equal values are in a random order."""
    bits = values.float().contiguous().view(torch.int32)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() + 2**31
    return (ordered << _TIE_BITS) + random_keys(uniforms)


def random_keys(uniforms: Tensor) -> Tensor:
    """[T] int64 keys in a random order."""
    return (uniforms * 2**_TIE_BITS).long()
