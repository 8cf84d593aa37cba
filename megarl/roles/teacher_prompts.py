"""What a teacher reads before the policy's responses: prompts of its own, or a correct response of the same group.

The second is `--teacher-context sibling` (SDPO, 2601.20802). A response's sibling is the first other response of its
group, in the group's order, that has the group's highest reward, if that is above `--teacher-context-reward`. Where no
term of `--reward` counts, a correct response has reward 1 and another 0. A response without such a sibling keeps its
prompt, and so does one whose prompt would be too long.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megarl.arguments import Settings
from megarl.batch import Batch, expand_ranges
from megarl.comm.load_balance import positions_by_group
from megarl.comm.role_mesh import RoleGroups
from megarl.data.conversations import Encoder
from megarl.data.places import for_teacher, with_response
from megarl.data.prompts import PromptSet
from megarl.data.ragged import Ragged
from megarl.data.turns import TurnTokens
from megarl.errors import warn
from megarl.groups import PromptGroups
from megarl.mcore import device
from megarl.rewards.expression import terms_of_run

# What a teacher reads before the N responses of a batch, None: the policy's prompt; and [N] int64 on the host, the same
# number only for the same prompt.
TeacherPrompts = tuple[list[Sequence[int] | None], Tensor]


def prompts_of_lines(batch: Batch, prompts: Ragged) -> TeacherPrompts:
    """The prompts of the batch's lines. `prompts`: tokens by line; a line without any keeps the policy's."""
    lines = batch.prompt_ids.cpu()
    return [prompts[line] or None for line in lines.tolist()], lines


def with_prompts(batch: Batch, prompts: TeacherPrompts) -> tuple[Batch, Tensor, Tensor]:
    """The sequences of a batch after other prompts; and where the tokens after the prompts are, in `batch` and in the
    result: both [R] int64, in the same order."""
    (of_rows, ids), lengths, old = prompts, batch.lengths.cpu(), batch.prompt_lengths.cpu()
    sizes = [own if tokens is None else len(tokens) for tokens, own in zip(of_rows, old.tolist(), strict=True)]
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
    spans = zip(of_rows, *(x.tolist() for x in (starts, old, read_starts)), strict=True)
    for prompt, start, length, at in spans:
        source = batch.tokens[start : start + length] if prompt is None else torch.tensor(prompt).to(tokens)
        tokens[at : at + len(source)] = source
    others = {name: getattr(batch, name) for name in ("sequence_ids", "finished", "solved", "teacher_ids")}
    read_batch = Batch(
        **others,
        prompt_ids=ids.to(batch.prompt_ids),
        lengths=(new + rest).to(batch.lengths),
        prompt_lengths=new.to(batch.lengths),
        tokens=tokens,
        response_mask=mask,
        row_starts=row_starts,
    )
    return read_batch, own, read


class SiblingContext:
    """Makes the prompts that a teacher reads in `--teacher-context sibling`, on each rank of its role."""

    def __init__(self, settings: Settings, template: str, encoder: Encoder):
        """`encoder`: the policy's, whose tokens are the teacher's."""
        self._template, self._turns = template, TurnTokens(encoder, settings.max_response_length)
        self._threshold = settings.teacher_context_reward
        self._max_length = settings.teacher_max_prompt_length
        self._has_rewards = any(term.weight for term in terms_of_run(settings))
        self._has_warned = False
        self._counts = torch.zeros(3, dtype=torch.int64)  # of the last batch: with a sibling's response, too long, all

    def prompts(self, batch: Batch, groups: PromptGroups, lines: PromptSet, own: TeacherPrompts) -> TeacherPrompts:
        """The prompts of a replica's batch, which has whole groups with their rewards.

        `groups`: of the step; `own`: what the teacher reads before responses without a sibling.
        """
        siblings, is_scored = self._siblings(batch, groups)
        starts, prompt_lengths = batch.cu_seqlens.tolist(), batch.prompt_lengths.tolist()
        sequences, tokens, numbers = batch.tokens.cpu(), list(own[0]), {}
        contexts: dict[int, list[int]] = {}  # by position of the sibling
        keys, too_long = [], 0
        for position, (line, sibling) in enumerate(zip(batch.prompt_ids.tolist(), siblings, strict=True)):
            if sibling is not None and sibling not in contexts:
                response = sequences[starts[sibling] + prompt_lengths[sibling] : starts[sibling + 1]].tolist()
                prompt = for_teacher(lines[line])
                messages = with_response(self._template, prompt, self._turns.text(response))
                contexts[sibling] = self._turns.first_prompt(messages, prompt.tools)
            if sibling is not None and len(contexts[sibling]) > self._max_length:
                too_long, sibling = too_long + 1, None
            if sibling is not None:
                tokens[position] = contexts[sibling]
            keys.append((line, sibling))
        ids = [numbers.setdefault(key, len(numbers)) for key in keys]
        read = sum(sibling is not None for _, sibling in keys)
        self._counts = torch.tensor([read, too_long, int(is_scored.sum())])
        return tokens, torch.tensor(ids, dtype=torch.int64)

    def metrics(self, role_groups: RoleGroups) -> dict[str, float]:
        """Metrics of the last batch, of all replicas; says once that some responses have no context. A collective of
        the teacher's role."""
        read, too_long, responses = role_groups.dp_all_reduce(self._counts.to(device.device())).tolist()
        if read < responses and not self._has_warned:
            self._has_warned = True
            if role_groups.is_leader and role_groups.dp_rank == 0:
                warn([_note(responses - read - too_long, too_long, responses)])
        return {
            "teacher/context_fraction": read / max(responses, 1),
            "teacher/context_too_long_fraction": too_long / max(responses, 1),
        }

    def _siblings(self, batch: Batch, groups: PromptGroups) -> tuple[list[int | None], Tensor]:
        """Position in the batch of each response's sibling, and which responses count at all: [N] bool."""
        is_scored = (batch.response_lengths > 0).cpu()
        rewards = (batch.need("scores") if self._has_rewards else batch.need("correct").float()).cpu()
        found: list[int | None] = [None] * len(batch)
        for members in positions_by_group(batch.sequence_ids.tolist(), groups):
            chosen = siblings(rewards[members].tolist(), is_scored[members].tolist(), self._threshold)
            for position, sibling in zip(members, chosen, strict=True):
                found[position] = None if sibling is None else members[sibling]
        return found, is_scored


def siblings(rewards: Sequence[float], is_scored: Sequence[bool], threshold: float) -> list[int | None]:
    """For each response of a group the position of its sibling, as of this module; None: it has none.

    `is_scored`: whether a response has a reward.
    """
    known = [reward for reward, scored in zip(rewards, is_scored, strict=True) if scored]
    highest = max(known, default=threshold)
    if not highest > threshold:
        return [None] * len(rewards)
    best = [number for number, reward in enumerate(rewards) if is_scored[number] and reward == highest]
    return [
        next((other for other in best if other != number), None) if is_scored[number] else None
        for number in range(len(rewards))
    ]


def _note(without: int, too_long: int, responses: int) -> str:
    return (
        f"--teacher-context sibling: of {responses:,} responses {without:,} have no correct sibling, and {too_long:,} "
        "would have a prompt above --teacher-max-prompt-length; the teacher reads their own prompts, in later steps, "
        "too (teacher/context_fraction, teacher/context_too_long_fraction)"
    )
