"""Which tokens train actor and critic, and which sequences count in statistics.

All tokens of the responses train, or with a mask only those of responses that have ended. Episodes whose environment
failed have no response tokens, and responses whose verifier failed lose theirs (`without_unscored`): they count
nowhere.
"""

import torch
from torch import Tensor

from megarl.algorithms.packed import broadcast_to_tokens
from megarl.arguments import Settings
from megarl.batch import Batch


def loss_mask(batch: Batch, settings: Settings) -> Tensor:
    """[T] bool: the tokens whose losses count.

    With `--mask-truncated-responses` a response that the length limit cut has none (overlong filtering, DAPO, arXiv
    2503.14476 §3.4). It leaves numerators and denominators alike, so the scale of the loss is that of the others.
    """
    if not settings.mask_truncated_responses:
        return batch.response_mask
    return broadcast_to_tokens(batch.finished, batch.response_mask, batch.cu_seqlens)


def actor_mask(batch: Batch, settings: Settings) -> Tensor:
    """[T] bool: the tokens whose losses count for the actor: without those that `--rollout-rejection` took out."""
    mask = loss_mask(batch, settings)
    return mask if batch.kept is None else mask & batch.kept


def without_unscored(batch: Batch, is_scored: Tensor) -> Tensor:
    """[T] bool: the response mask without the responses that have no score. `is_scored`: [N] bool."""
    return broadcast_to_tokens(is_scored, batch.response_mask, batch.cu_seqlens)


def valid_sequences(batch: Batch, settings: Settings) -> Tensor:
    """[N] bool: the sequences that count in means and statistics: those with response tokens."""
    if not settings.can_lose_responses:
        return torch.ones_like(batch.lengths, dtype=torch.bool)
    return batch.response_lengths > 0


def is_all_masked(count: Tensor, settings: Settings) -> bool:
    """Whether a mini-batch of `count` unmasked tokens on all replicas has nothing to learn from.

    Its gradient is 0; an optimizer with momentum or weight decay would move the weights all the same.
    """
    can_be_empty = settings.mask_truncated_responses or settings.can_lose_responses
    return (can_be_empty or settings.rollout_rejection is not None) and not bool(count)


def masked_tokens(batch: Batch, settings: Settings) -> Tensor:
    """Number of response tokens of a batch without a loss, as a scalar."""
    return torch.logical_and(batch.response_mask, ~loss_mask(batch, settings)).sum()
