"""Batches of a replica's responses, by sequence id: chosen, split, joined and cut."""

import torch
from torch import Tensor

from megarl.algorithms.packed import sums_by_sequence
from megarl.batch import Batch, concatenate, expand_ranges


def rows_by_id(batch: Batch | None) -> dict[int, tuple[list[int], int]]:
    """(tokens, prompt length) of each sequence by id."""
    if batch is None:
        return {}
    tokens = [row.tolist() for row in batch.tokens.split(batch.lengths.tolist())]
    return dict(zip(batch.sequence_ids.tolist(), zip(tokens, batch.prompt_lengths.tolist(), strict=True), strict=True))


def selected(batch: Batch | None, is_chosen: Tensor) -> Batch | None:
    """The sequences whose ids are chosen ([N] bool), numbered among the chosen ones; None if there are none."""
    chosen = None if batch is None else batch.renumbered(is_chosen)
    return chosen if chosen is not None and len(chosen) else None


def split_at(batch: Batch | None, count: int) -> tuple[Batch | None, Batch | None]:
    """The sequences with ids below `count` and the others, each numbered from 0; None instead of an empty batch."""
    if batch is None:
        return None, None
    is_front = torch.arange(int(batch.sequence_ids[-1]) + 1) < count
    return selected(batch, is_front), selected(batch, ~is_front)


def joined(front: Batch | None, back: Batch | None, count: int) -> Batch | None:
    """Both batches, with the ids of the second moved up by `count`."""
    if back is not None:
        back.sequence_ids = back.sequence_ids + count
    batches = [batch for batch in (front, back) if batch is not None]
    return concatenate(batches) if batches else None


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
