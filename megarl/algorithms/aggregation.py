"""Sums over micro-batches and ranks: losses aggregated into the scalar to differentiate, and mean, variance, whitening.

A mean of micro-batch means depends on how tokens are split into micro-batches and ranks. A local sum over a global
count does not: summed over micro-batches and ranks it is the loss of the whole mini-batch, whatever the split.
"""

from megarl.algorithms.packed import require_same_shape, response_counts, sums_by_sequence
from megarl.deferred import Tensor, torch

# Relative rounding error of a float64 sum of squares, with a margin for the order of additions. A variance from such a
# sum loses the digits by which mean² exceeds it: 1e-8 of it if the mean is 10,000 deviations from 0, far beyond
# rewards, values and advantages.
_ROUNDING = 1e-14
AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Scalar sum of `values` [T] where `mask` is True, in their dtype; an empty mask gives 0 with a gradient of 0.

    Masked-out entries are replaced, not multiplied by zero, so that inf or NaN there does not enter the result.
    """
    require_same_shape(values=values, mask=mask)
    return torch.where(mask, values, torch.zeros_like(values)).sum()


def token_mean(losses: Tensor, mask: Tensor, global_count: Tensor | int) -> Tensor:
    """This micro-batch's share of the mean loss over all valid tokens: sum over local valid tokens / global count.

    Args:
        losses: [T] per-token losses of one micro-batch on one rank.
        global_count: valid tokens of the whole mini-batch, summed over micro-batches and data- and context-parallel
            ranks.

    Returns:
        Scalar. Summed over micro-batches and ranks it is the token mean, so the caller sums gradients over them and
        does not average. With a count of 0 it is exactly 0, and so is its gradient.
    """
    return masked_sum(losses, mask) / _divisor(global_count, losses)


def local_counts(mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """This micro-batch's additive counts for `aggregate`: float64 [2] = (valid tokens, sequences with one)."""
    counts = response_counts(mask, cu_seqlens)
    return torch.stack([counts.sum(), (counts > 0).sum()]).double()


def aggregate(
    losses: Tensor, mask: Tensor, cu_seqlens: Tensor, mode: str, counts: Tensor, norm: float | None = None
) -> Tensor:
    """This micro-batch's share of a mini-batch's loss. With l_it the losses of sequence i and n_i its valid tokens:

    token-mean: Σ_i Σ_t l_it / Σ_i n_i (DAPO, arXiv 2503.14476); seq-mean-token-mean: mean_i (Σ_t l_it / n_i) (GRPO,
    arXiv 2402.03300); seq-mean-token-sum: mean_i Σ_t l_it; seq-mean-token-sum-norm: mean_i Σ_t l_it / norm (Dr. GRPO,
    arXiv 2503.20783). A sequence without valid tokens does not count in mean_i.

    Args:
        losses: [T] per-token losses of one micro-batch on one rank.
        mode: one of `AGGREGATIONS`, else ValueError.
        counts: float64 [2], `local_counts` summed over the micro-batches and ranks of the mini-batch.
        norm: tokens, a constant of the run; "seq-mean-token-sum-norm" alone reads it: ValueError unless it is > 0.

    Returns:
        Scalar, to be summed over micro-batches and ranks, as is its gradient. Without any valid token both are 0.
    """
    if mode not in AGGREGATIONS:
        raise ValueError(f"loss aggregation {mode!r} is unknown, allowed: {', '.join(AGGREGATIONS)}")
    tokens, sequences = counts
    if mode == "token-mean":
        return token_mean(losses, mask, tokens)
    require_same_shape(losses=losses, mask=mask)
    sums = sums_by_sequence(losses, mask, cu_seqlens)
    if mode == "seq-mean-token-mean":
        sums = sums / response_counts(mask, cu_seqlens).clamp(min=1)
    if mode == "seq-mean-token-sum-norm":
        if norm is None or not norm > 0:
            raise ValueError(f"loss aggregation {mode} needs a norm > 0, got {norm}")
        sums = sums / norm
    return sums.sum() / _divisor(sequences, losses)


def _divisor(count: Tensor | int, losses: Tensor) -> Tensor:
    count = torch.as_tensor(count, dtype=losses.dtype, device=losses.device)
    # With a count of 0 nothing is valid anywhere: the sum is 0, and dividing by 1 keeps NaN out of the gradient.
    return count.clamp(min=1)


def local_moments(values: Tensor, mask: Tensor) -> Tensor:
    """Additive moments of the valid entries of `values` [T]: float64 [3] = (count, sum, sum of squares)."""
    require_same_shape(values=values, mask=mask)
    valid = torch.where(mask, values.detach().double(), 0.0)
    return torch.stack([mask.sum().double(), valid.sum(), valid.square().sum()])


def mean_and_variance(moments: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and unbiased variance, float64 scalars, from all-reduced `local_moments`; 0 without any, or one value."""
    count, total, total_of_squares = moments.double().unbind()
    mean = total / count.clamp(min=1)
    return mean, centred_squares(count, total, total_of_squares) / (count - 1).clamp(min=1)


def whiten(values: Tensor, mask: Tensor, moments: Tensor) -> Tensor:
    """Scale the valid entries to mean 0 and unit variance by global moments: (x − mean) / sqrt(variance + 1e-8).

    As in verl: unbiased variance, epsilon inside the root. It keeps equal values finite: they become 0.

    Computed in float64, returned in the dtype of `values` [T], 0 outside the mask. A single valid token becomes 0.
    `moments`: `local_moments` summed over all ranks and micro-batches.
    """
    require_same_shape(values=values, mask=mask)
    mean, variance = mean_and_variance(moments)
    whitened = (values.double() - mean) * torch.rsqrt(variance + 1e-8)
    return torch.where(mask, whitened, 0.0).to(values.dtype)


def centred_squares(count: Tensor, total: Tensor, total_of_squares: Tensor) -> Tensor:
    """Σ(x − mean)² from raw sums; 0 if negative or below the rounding error of the subtraction."""
    centred = total_of_squares - total.square() / count.clamp(min=1)
    return torch.where(centred > _ROUNDING * total_of_squares, centred, torch.zeros_like(centred))
