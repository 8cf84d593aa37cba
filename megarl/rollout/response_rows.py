"""Batches of a replica's responses, by sequence id: chosen, split, joined and cut."""

import torch

from megarl.algorithms.packed import sums_by_sequence
from megarl.batch import Batch, concatenate, expand_ranges


def rows_by_id(batch: Batch) -> dict[int, tuple[list[int], int]]:
    """(tokens, prompt length) of each sequence by id."""
    tokens = [row.tolist() for row in batch.tokens.split(batch.lengths.tolist())]
    return dict(zip(batch.sequence_ids.tolist(), zip(tokens, batch.prompt_lengths.tolist(), strict=True), strict=True))


def split_at(batch: Batch, count: int) -> tuple[Batch, Batch]:
    """The sequences with ids below `count`, and the others, with ids moved down by `count`."""
    is_front = batch.sequence_ids < count
    front, back = (batch.select(is_chosen.nonzero().flatten()) for is_chosen in (is_front, ~is_front))
    back.sequence_ids = back.sequence_ids - count
    return front, back


def joined(front: Batch, back: Batch, count: int) -> Batch:
    """Both batches, with the ids of the second moved up by `count`."""
    back.sequence_ids = back.sequence_ids + count
    return concatenate([front, back])


def forced_responses(batch: Batch) -> int:
    """How many responses have tokens of a thinking budget, in a batch in which no response has lost its mask."""
    if batch.forced is not None:  # with an environment, whose tokens are not in the mask either
        return int((sums_by_sequence(batch.forced.long(), batch.forced, batch.cu_seqlens) > 0).sum())
    return int((batch.response_lengths < batch.lengths - batch.prompt_lengths).sum())


def truncated_to(batch: Batch, longest: int) -> Batch:
    """Truncates each response to `longest` new tokens; a truncated response is not finished."""
    lengths = batch.lengths.minimum(batch.prompt_lengths + longest)
    every = torch.arange(len(batch), device=lengths.device)
    cut = batch.take(every, expand_ranges(batch.cu_seqlens[:-1], lengths))
    cut.lengths, cut.finished = lengths, batch.finished & (lengths == batch.lengths)
    return cut
