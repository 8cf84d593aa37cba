"""The preference loss of a reward model."""

from torch import Tensor
from torch.nn.functional import logsigmoid

from megarl.algorithms.packed import require_same_shape


def bradley_terry(chosen: Tensor, rejected: Tensor, margin: Tensor, centring: float = 0.0) -> Tensor:
    """−log σ(c − r − m) + κ·(c + r)² of each pair: Bradley and Terry's model of preferences (2203.02155 eq. 1).

    The margin m requires a larger difference where the preference is strong (2307.09288 eq. 2). Only differences of
    scores enter the first term; κ pulls their mean to 0 (2312.09244 eq. 2).

    Args:
        chosen: [P] scores c of the preferred responses.
        rejected: [P] scores r of the others.
        margin: [P] m ≥ 0; a constant.
        centring: κ ≥ 0.

    Returns:
        [P] terms, differentiable in the scores; log 2 where both scores are equal and m and κ are 0.

    Raises:
        ValueError: shapes differ or κ is negative.
    """
    require_same_shape(chosen=chosen, rejected=rejected, margin=margin)
    if not centring >= 0:
        raise ValueError(f"centring coefficient must be >= 0, got {centring}")
    terms = -logsigmoid(chosen - rejected - margin.detach())
    return terms + centring * (chosen + rejected).square() if centring else terms
