"""From logits and uniform numbers to tokens: temperature, top-k, top-p, inverse distribution function."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 256  # tokens of the vocabulary whose weights are summed up before one of them is looked for


@dataclass(frozen=True)
class SamplingSettings:
    """How tokens are drawn. The log-probs of a rollout are those of the temperature-scaled policy over the whole
    vocabulary, the ones that training recomputes; top-k and top-p narrow what is drawn, not what is logged."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    greedy: bool = False


def restrict_to_top_k_top_p(weights: Tensor, settings: SamplingSettings) -> Tensor:
    """[N, V] probabilities, or any multiple of them -> the same, 0 outside of top-k and top-p."""
    if 0 < settings.top_k < weights.shape[-1]:
        # A stable order keeps exactly k tokens where probabilities tie, as those of 16-bit logits often do.
        order = weights.sort(dim=-1, descending=True, stable=True).indices
        weights = weights.scatter(-1, order[:, settings.top_k :], 0.0)
    if settings.top_p < 1.0:
        ordered, order = weights.sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(-1) - ordered
        outside = before >= settings.top_p * ordered.sum(-1, keepdim=True)  # the token that crosses the mass stays
        weights = weights.masked_fill(outside.scatter(-1, order, outside), 0.0)
    return weights


def _first_above(masses: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Of [N, M] masses the first place [N, 1] whose cumulative mass exceeds wanted [N, 1], and cumulative masses."""
    cumulative = masses.double().cumsum(-1)
    # A wanted mass is below the total, but rounding may reach it: the last place with mass is the answer then.
    last = (cumulative < cumulative[:, -1:]).sum(-1, keepdim=True)
    return torch.searchsorted(cumulative, wanted, right=True).minimum(last), cumulative


def inverse_cdf(weights: Tensor, numbers: Tensor) -> Tensor:
    """[N] tokens: the first whose cumulative share of the weights [N, V] exceeds its uniform number [N] float64.

    First the block of the vocabulary, then the token in it: what is summed up in double precision stays small.
    """
    width = math.gcd(weights.shape[-1], BLOCK)
    blocks = weights.unflatten(-1, (-1, width if width >= BLOCK // 8 else weights.shape[-1]))
    masses = blocks.sum(-1)
    wanted = numbers.unsqueeze(-1) * masses.double().sum(-1, keepdim=True)
    if blocks.shape[1] == 1:
        return _first_above(weights, wanted)[0].squeeze(-1)
    block, cumulative = _first_above(masses, wanted)
    before = cumulative.gather(-1, block) - masses.gather(-1, block)
    within = blocks.take_along_dim(block.unsqueeze(-1), 1).squeeze(1)
    token, _ = _first_above(within, wanted - before)
    return (block * within.shape[-1] + token).squeeze(-1)


def sample_tokens(logits: Tensor, weights: Tensor, numbers: Tensor, settings: SamplingSettings) -> Tensor:
    """[N] tokens from logits [N, V] and `weights`, the exponentials of the scaled ones up to a factor a row; [N, ≥ V],
    0 in columns behind the vocabulary."""
    return logits.argmax(-1) if settings.greedy else inverse_cdf(restrict_to_top_k_top_p(weights, settings), numbers)
