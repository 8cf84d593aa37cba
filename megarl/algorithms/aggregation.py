"""How per-token losses become the one number that is differentiated: local sum / global count, always.

A mean of micro-batch means depends on how tokens fall into micro-batches and ranks. A local sum over a count that
is the same everywhere does not: the sum of all parts is the loss of the whole mini-batch, whatever the split.
"""

import torch
from torch import Tensor

from megarl.algorithms.packed import require_same_shape


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum of `values` [T] where `mask` [T] (bool) is True, as a scalar of the dtype of `values`.

    Masked-out entries are replaced before the sum, not multiplied by zero, so inf or NaN there does not enter the
    result. An empty mask gives 0 with a gradient of 0.

    Raises:
        ValueError: shapes differ.
    """
    require_same_shape(values=values, mask=mask)
    return torch.where(mask, values, torch.zeros_like(values)).sum()


def token_mean(losses: Tensor, mask: Tensor, global_count: Tensor | int) -> Tensor:
    """This part's share of the mean loss over all valid tokens: sum over local valid tokens / global count.

    Args:
        losses: [T] per-token losses of one micro-batch on one rank.
        mask: [T] bool, the tokens that count.
        global_count: valid tokens of the whole mini-batch: summed over all of its micro-batches and all-reduced over
            the data- and context-parallel ranks. A whole number, the same on every rank.

    Returns:
        Scalar. Summed over micro-batches and ranks it is the token mean. The caller must therefore sum gradients over
        ranks and micro-batches, not average them. With a count of 0 it is exactly 0, and so is its gradient.

    Raises:
        ValueError: shapes differ.
    """
    count = torch.as_tensor(global_count, dtype=losses.dtype, device=losses.device)
    # A count of 0 means no valid token anywhere: the sum is 0 already, and 0 / 1 keeps NaN out of the gradient.
    return masked_sum(losses, mask) / count.clamp(min=1)
