"""Batches in which a teacher reads other prompts than the policy, with the same responses."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megarl.batch import Batch, expand_ranges
from megarl.data.ragged import Ragged


class TeacherPrompts(NamedTuple):
    """What a teacher reads before the responses of a batch."""

    tokens: list[Sequence[int] | None]  # [N]; None: the policy's prompt
    ids: Tensor  # [N] int64 on the host: the same number only for the same prompt


class ResponsePlaces(NamedTuple):
    """Where the tokens after the prompts are in two batches with other prompts; both [R] int64, in the same order."""

    own: Tensor
    read: Tensor


def prompts_of_lines(batch: Batch, prompts: Ragged) -> TeacherPrompts:
    """The prompts of the batch's lines. `prompts`: tokens by line; a line without any keeps the policy's."""
    lines = batch.prompt_ids.cpu()
    return TeacherPrompts([prompts[line] or None for line in lines.tolist()], lines)


def with_prompts(batch: Batch, prompts: TeacherPrompts) -> tuple[Batch, ResponsePlaces]:
    """The sequences of a batch after other prompts, and where their responses are in both."""
    lengths, old = batch.lengths.cpu(), batch.prompt_lengths.cpu()
    sizes = [own if tokens is None else len(tokens) for tokens, own in zip(prompts.tokens, old.tolist(), strict=True)]
    starts, new, rest = batch.cu_seqlens.cpu()[:-1], torch.tensor(sizes, dtype=torch.int64), lengths - old
    read_starts = (new + rest).cumsum(0) - (new + rest)
    own = expand_ranges(starts + old, rest).to(batch.tokens.device)
    read = expand_ranges(read_starts + new, rest).to(batch.tokens.device)
    total = int((new + rest).sum())
    tokens, mask = batch.tokens.new_zeros(total), batch.response_mask.new_zeros(total)
    tokens[read], mask[read] = batch.tokens[own], batch.response_mask[own]
    row_starts = None
    if batch.row_starts is not None:  # the first row alone has the prompt that changes
        row_starts = torch.zeros_like(mask)
        row_starts[read] = batch.row_starts[own]
    spans = zip(prompts.tokens, *(x.tolist() for x in (starts, old, read_starts)), strict=True)
    for prompt, start, length, at in spans:
        source = batch.tokens[start : start + length] if prompt is None else torch.tensor(prompt).to(tokens)
        tokens[at : at + len(source)] = source
    others = {name: getattr(batch, name) for name in ("sequence_ids", "finished", "solved", "teacher_ids")}
    read_batch = Batch(
        **others, prompt_ids=prompts.ids.to(batch.prompt_ids), lengths=(new + rest).to(batch.lengths),
        prompt_lengths=new.to(batch.lengths), tokens=tokens, response_mask=mask, row_starts=row_starts,
    )  # fmt: skip
    return read_batch, ResponsePlaces(own, read)
