"""Aggregates per-token losses into the scalar to differentiate: always a local sum / a global count.

A mean of micro-batch means depends on how tokens are split into micro-batches and ranks. A local sum over a global
count does not: summed over micro-batches and ranks it is the loss of the whole mini-batch, whatever the split. All
functions raise ValueError where shapes differ.
"""

from megarl.algorithms.packed import require_same_shape, response_counts, sums_by_sequence
from megarl.deferred import Tensor, torch

AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum of `values` [T] where `mask` [T] (bool) is True, as a scalar of the dtype of `values`.

    Masked-out entries are replaced before the sum, not multiplied by zero, so inf or NaN there does not enter the
    result. An empty mask gives 0 with a gradient of 0.
    """
    require_same_shape(values=values, mask=mask)
    return torch.where(mask, values, torch.zeros_like(values)).sum()


def token_mean(losses: Tensor, mask: Tensor, global_count: Tensor | int) -> Tensor:
    """This micro-batch's share of the mean loss over all valid tokens: sum over local valid tokens / global count.

    Args:
        losses: [T] per-token losses of one micro-batch on one rank.
        mask: [T] bool, the tokens that count.
        global_count: valid tokens of the whole mini-batch: summed over all of its micro-batches and all-reduced over
            the data- and context-parallel ranks. An integer, the same on every rank.

    Returns:
        Scalar. Summed over micro-batches and ranks it is the token mean. The caller must therefore sum gradients over
        ranks and micro-batches, not average them. With a count of 0 it is exactly 0, and so is its gradient.
    """
    return masked_sum(losses, mask) / _divisor(global_count, losses)


def local_counts(mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """This micro-batch's counts for `aggregate`: float64 [2] = (valid tokens, sequences with a valid token).

    Additive over micro-batches of whole sequences. `mask` [T] bool, `cu_seqlens` [N+1].
    """
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
        losses: [T] per-token losses of one micro-batch on one rank, of whole sequences.
        mask: [T] bool, the tokens that count.
        cu_seqlens: [N+1].
        mode: one of `AGGREGATIONS`.
        counts: float64 [2], `local_counts` summed over the micro-batches and ranks of the mini-batch.
        norm: tokens > 0, a constant of the run; only "seq-mean-token-sum-norm" uses it.

    Returns:
        Scalar, to be summed over micro-batches and ranks, as is its gradient; `token_mean` for "token-mean". Without
        any valid token it is exactly 0, and so is its gradient.

    Raises:
        ValueError: the mode is unknown, or needs a `norm` > 0.
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
