"""KTO: single responses with a label, instead of pairs."""

import torch
from torch import Tensor

from megarl.algorithms.preference_loss import PreferenceLoss, PreferenceOptions


def kto(
    logprobs: Tensor, reference: Tensor, is_desirable: Tensor, divergence: Tensor, options: PreferenceOptions
) -> tuple[Tensor, Tensor]:
    """λ_D · (1 − σ(r − z)) of a desirable response, λ_U · (1 − σ(z − r)) of another (2402.01306 eq. 8).

    r = β · (log π − log π_ref) is the implicit reward, z = β · `divergence` that of a response which says nothing of
    the prompt.

    Args:
        logprobs: [N] float64 Σ log π over the tokens of each response; differentiable.
        reference: [N] float64 Σ log π_ref.
        is_desirable: [N] bool.
        divergence: [] estimate of KL(π‖π_ref), at least 0; no gradient (`mismatched_divergence`).

    Returns:
        [N] losses, and [N] rewards r without gradient.
    """
    reward = options.beta * (logprobs - reference)
    difference = reward - options.beta * divergence.detach()
    signed = torch.where(is_desirable, difference, -difference)
    weights = signed.new_tensor([options.undesirable_weight, options.desirable_weight])[is_desirable.long()]
    return weights * torch.sigmoid(-signed), reward.detach()


def mismatched_divergence(drift: Tensor, count: Tensor) -> Tensor:
    """max(0, Σ drift / count): KL(π‖π_ref), estimated on responses to other prompts.

    `drift`: Σ (log π − log π_ref) over such responses; `count`: their number.
    """
    return (drift / count).clamp(min=0)


LOSS = PreferenceLoss(
    "kto", kto, frozenset({"beta", "desirable_weight", "undesirable_weight"}), needs_reference=True, reads_pairs=False
)  # fmt: skip
