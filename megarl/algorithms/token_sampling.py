"""Samples tokens from logits and uniform numbers: temperature, top-k, top-p, inverse CDF."""

import math

import torch
from torch import Tensor

from megarl.algorithms.sampling_settings import SamplingSettings

BLOCK = 256  # vocabulary tokens per block of the two-level search


def restrict_to_top_k_top_p(weights: Tensor, settings: SamplingSettings) -> Tensor:
    """Zero the weights [N, V] (probabilities, or any multiple of them) outside of top-k and top-p."""
    if 0 < settings.top_k < weights.shape[-1]:
        # A stable sort keeps exactly k tokens when probabilities tie, as those of 16-bit logits often do.
        order = weights.sort(dim=-1, descending=True, stable=True).indices
        weights = weights.scatter(-1, order[:, settings.top_k :], 0.0)
    if settings.top_p < 1.0:
        ordered, order = weights.sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(-1) - ordered
        outside = before >= settings.top_p * ordered.sum(-1, keepdim=True)  # keep the token that crosses top_p
        weights = weights.masked_fill(outside.scatter(-1, order, outside), 0.0)
    return weights


def _first_above(masses: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """First index [N, 1] whose cumulative mass exceeds target [N, 1], and cumulative masses, of masses [N, M]."""
    cumulative = masses.double().cumsum(-1)
    # The target is below the total, but rounding may reach it: then return the last index with mass.
    last = (cumulative < cumulative[:, -1:]).sum(-1, keepdim=True)
    return torch.searchsorted(cumulative, target, right=True).minimum(last), cumulative


def inverse_cdf(weights: Tensor, numbers: Tensor) -> Tensor:
    """[N] tokens: the first whose cumulative share of the weights [N, V] exceeds its uniform number [N] float64.

    Finds the block of the vocabulary, then the token in it, so that few values are summed in double precision.
    """
    width = math.gcd(weights.shape[-1], BLOCK)
    blocks = weights.unflatten(-1, (-1, width if width >= BLOCK // 8 else weights.shape[-1]))
    masses = blocks.sum(-1)
    target = numbers.unsqueeze(-1) * masses.double().sum(-1, keepdim=True)
    if blocks.shape[1] == 1:
        return _first_above(weights, target)[0].squeeze(-1)
    block, cumulative = _first_above(masses, target)
    before = cumulative.gather(-1, block) - masses.gather(-1, block)
    within = blocks.take_along_dim(block.unsqueeze(-1), 1).squeeze(1)
    token, _ = _first_above(within, target - before)
    return (block * within.shape[-1] + token).squeeze(-1)


def sample_tokens(logits: Tensor, weights: Tensor, numbers: Tensor, settings: SamplingSettings) -> Tensor:
    """[N] tokens from logits [N, V] and `weights` [N, ≥ V]: the exponentials of the temperature-scaled logits up to a
    factor per row, 0 in columns after the vocabulary."""
    return logits.argmax(-1) if settings.greedy else inverse_cdf(restrict_to_top_k_top_p(weights, settings), numbers)
