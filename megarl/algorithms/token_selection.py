"""Selects tokens of a whole mini-batch, on all ranks together: the largest by a quantity, or some at random.

A loss that treats such tokens apart cannot choose them in a micro-batch: the choice would depend on the layout. So they
are chosen before the update, from what is known then (`MinibatchTokens`), by sums over ranks: a radix search finds the
place at which the sorted tokens of all ranks are cut, without gathering them, in eight sums of 512 numbers.
"""

from collections.abc import Callable
from typing import NamedTuple

from megarl.deferred import Tensor, torch

_DIGIT = 8  # bits that a round of the search finds
_TIE_BITS = 31


class MinibatchTokens(NamedTuple):
    """What is known of a mini-batch before its update: this rank's T tokens. Read at tokens of the mask only."""

    logprobs: Tensor  # [T] log π_old
    rollout_logprobs: Tensor  # [T] log μ
    advantages: Tensor  # [T]
    mask: Tensor  # [T] bool, the tokens with a loss
    uniforms: Tensor  # [T] float64 in (0, 1), a random number of each token, whatever rank holds it
    total: Callable[[Tensor], Tensor]  # sums a tensor over the ranks


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
        number = fits(*reached).long().cumprod(0).sum()
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


def covariances(tokens: MinibatchTokens) -> tuple[Tensor, Tensor]:
    """(c, n): [T] float64 each token's share c = (A − mean A)·(log π − mean log π) of their covariance, with means over
    the n tokens of the mini-batch. arXiv 2505.22617, eq. 10, with π_old for π."""
    columns = [torch.where(tokens.mask, x.double(), 0.0) for x in (tokens.advantages, tokens.logprobs)]
    sums = tokens.total(torch.stack([tokens.mask.sum().double(), *(column.sum() for column in columns)]))
    means = sums[1:] / sums[0].clamp(min=1)
    advantages, logprobs = (column - mean for column, mean in zip(columns, means, strict=True))
    return advantages * logprobs, sums[0]
