"""The teacher role: a frozen model whose distributions the policy learns.

With `--distill reward` the teacher sends its log-prob of each response token. With `--distill loss` it sends hidden
states, and the policy's last stage forms both models' logits itself (`teacher_output`): T · H_T numbers instead of
T · V, and no token of the vocabulary is left out.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from megarl.arguments import RoleSettings, Settings
from megarl.batch import Batch, expand_ranges
from megarl.comm import microbatches as mb
from megarl.comm.role_mesh import RoleGroups, RoleMesh
from megarl.data.ragged import Ragged
from megarl.flags.distill_settings import AVERAGE, REWARD
from megarl.mcore.model import forward_pass
from megarl.observe.timers import Timers
from megarl.roles.frozen_model import FrozenModel
from megarl.roles.policy_scores import policy_scores
from megarl.roles.trainable_model import TrainableModel
from megarl.roles.weight_refresh import WeightRefresh


class Teacher:
    """A frozen teacher on the ranks of the role."""

    name = "teacher"

    def __init__(
        self, settings: Settings, role: RoleSettings | None, role_groups: RoleGroups, vocab_size: int, timers: Timers,
        prompts: Ragged | None = None,
    ):  # fmt: skip
        """
        Args:
            settings, role, role_groups, timers: as of `Reference`.
            vocab_size: tokens that the teacher's model knows.
            prompts: by line, the tokens of the prompt that the teacher reads instead; none: the policy's.
        """
        self.settings, self.role_groups = settings, role_groups
        self.vocab_size, self.timers, self._prompts = vocab_size, timers, prompts
        (self._output,) = settings.teacher_fields[:1]
        self._refresh: WeightRefresh | None = None
        self.frozen_model: FrozenModel | None = None
        if role_groups.is_member:
            self.frozen_model = FrozenModel(role, role_groups, vocab_size, timers)

    def plan_refreshes(self, mesh: RoleMesh, actor: TrainableModel | None):
        """Plans how the moving average of the actor reaches a teacher that follows it. Collective.

        `actor`: its model on this rank; None outside the role.
        """
        if self.settings.teacher == AVERAGE and (actor is not None or self.frozen_model is not None):
            self._refresh = WeightRefresh(mesh, self.name, actor, self.frozen_model, 1.0, self.timers)

    def refresh(self) -> dict[str, float]:
        """Gives a teacher that follows the actor the weights that its model has now, the average; returns metrics.
        Collective."""
        return {} if self._refresh is None else {"weights/teacher_bytes": self._refresh.run()}

    def score_batch(self, batch: Batch):
        """Fills `teacher_logprobs` or `teacher_states` of a replica's batch. A collective of the role."""
        read, places = (batch, None) if self._prompts is None else with_prompts(batch, self._prompts)
        if self.settings.distill == REWARD:
            results = self.frozen_model.forward_only(read, self._logprobs)
            mb.write_back(read, "teacher_logprobs", [(scores.logprobs, at) for scores, at in results])
        else:
            results = self.frozen_model.forward_only(read, self._states)
            mb.write_back_rows(read, "teacher_states", results)
        if places is not None:
            values = getattr(read, self._output)
            setattr(batch, self._output, values.new_zeros(len(batch.tokens), *values.shape[1:]))
            getattr(batch, self._output)[places.own] = values[places.read]

    def _logprobs(self, chunk, microbatch: Batch) -> forward_pass.TokenScores:
        return policy_scores(chunk, microbatch, self.settings.teacher_temperature, self.vocab_size)

    def _states(self, chunk, microbatch: Batch) -> Tensor:
        host = microbatch.host_metadata
        return forward_pass.token_states(
            chunk, microbatch.tokens, host.lengths, microbatch.routing, host.response_mask, host.shared
        )


class ResponsePlaces(NamedTuple):
    """Where the tokens after the prompts are in two batches with other prompts; both [R] int64, in the same order."""

    own: Tensor
    read: Tensor


def with_prompts(batch: Batch, prompts: Ragged) -> tuple[Batch, ResponsePlaces]:
    """The sequences of a batch after other prompts, and where their responses are in both.

    `prompts`: tokens by line; a line without any keeps the prompt of its sequences.
    """
    lines, lengths, old = (x.cpu() for x in (batch.prompt_ids, batch.lengths, batch.prompt_lengths))
    counts = torch.from_numpy(prompts.lengths(lines.numpy()))
    starts, new = batch.cu_seqlens.cpu()[:-1], torch.where(counts > 0, counts, old)
    rest = lengths - old
    read_starts = (new + rest).cumsum(0) - (new + rest)
    own = expand_ranges(starts + old, rest).to(batch.tokens.device)
    read = expand_ranges(read_starts + new, rest).to(batch.tokens.device)
    total = int((new + rest).sum())
    tokens, mask = batch.tokens.new_zeros(total), batch.response_mask.new_zeros(total)
    tokens[read], mask[read] = batch.tokens[own], batch.response_mask[own]
    for line, count, start, length, at in zip(
        *(x.tolist() for x in (lines, counts, starts, old, read_starts)), strict=True
    ):
        source = batch.tokens[start : start + length] if not count else torch.tensor(prompts[line]).to(tokens)
        tokens[at : at + len(source)] = source
    others = {name: getattr(batch, name) for name in ("sequence_ids", "prompt_ids", "finished", "solved")}
    read_batch = Batch(
        **others, lengths=(new + rest).to(batch.lengths), prompt_lengths=new.to(batch.lengths), tokens=tokens,
        response_mask=mask,
    )  # fmt: skip
    return read_batch, ResponsePlaces(own, read)
