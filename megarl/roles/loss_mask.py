"""Which tokens train actor and critic: all of the responses, or with a mask only those of responses that have ended."""

import torch
from torch import Tensor

from megarl.algorithms.packed import spread
from megarl.arguments import Settings
from megarl.batch import Batch


def loss_mask(batch: Batch, settings: Settings) -> Tensor:
    """[T] bool: the tokens whose losses count.

    With `--mask-truncated-responses` a response that the length limit cut has none (overlong filtering, DAPO, arXiv
    2503.14476 §3.4). It leaves numerators and denominators alike, so the scale of the loss is that of the others.
    """
    if not settings.mask_truncated_responses:
        return batch.response_mask
    return spread(batch.finished, batch.response_mask, batch.cu_seqlens)


def is_all_masked(count: Tensor, settings: Settings) -> bool:
    """Whether a mini-batch of `count` unmasked tokens on all replicas has nothing to learn from.

    Its gradient is 0; an optimizer with momentum or weight decay would move the weights all the same.
    """
    return settings.mask_truncated_responses and not bool(count)


def masked_tokens(batch: Batch, settings: Settings) -> Tensor:
    """Number of response tokens of a batch without a loss, as a scalar."""
    return torch.logical_and(batch.response_mask, ~loss_mask(batch, settings)).sum()
