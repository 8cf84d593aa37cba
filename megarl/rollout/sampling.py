"""From logits and uniform numbers to tokens: temperature, top-k, top-p, inverse distribution function."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SamplingSettings:
    """How tokens are drawn. The log-probs of a rollout are those of the temperature-scaled policy over the whole
    vocabulary, the ones that training recomputes; top-k and top-p narrow what is drawn, not what is logged."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    greedy: bool = False


def distribution(logits: Tensor, settings: SamplingSettings) -> Tensor:
    """[N, V] raw logits -> [N, V] probabilities, not renormalised after top-k and top-p."""
    probabilities = (logits.float() / settings.temperature).softmax(-1)
    if 0 < settings.top_k < logits.shape[-1]:
        # A stable order keeps exactly k tokens where probabilities tie, as those of 16-bit logits often do.
        order = probabilities.sort(dim=-1, descending=True, stable=True).indices
        probabilities = probabilities.scatter(-1, order[:, settings.top_k :], 0.0)
    if settings.top_p < 1.0:
        ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(-1) - ordered
        outside = before >= settings.top_p * ordered.sum(-1, keepdim=True)  # the token that crosses the mass stays
        probabilities = probabilities.masked_fill(outside.scatter(-1, order, outside), 0.0)
    return probabilities


def draw(logits: Tensor, numbers: Tensor, settings: SamplingSettings) -> Tensor:
    """[N] tokens: the first whose cumulative probability exceeds its uniform number [N] float64."""
    if settings.greedy:
        return logits.argmax(-1)
    cumulative = distribution(logits, settings).double().cumsum(-1)
    wanted = numbers.unsqueeze(-1) * cumulative[:, -1:]
    # A wanted mass is below the total, but rounding may reach it: the last token with mass is the answer then.
    last = (cumulative < cumulative[:, -1:]).sum(-1)
    return torch.searchsorted(cumulative, wanted, right=True).squeeze(-1).minimum(last)
