"""A reward model, or an ensemble of them: reads what was written with its own template and tokenizer, and scores it."""

from pathlib import Path

import torch
from torch import Tensor

from megarl.algorithms.normalization import combine
from megarl.arguments import RoleSettings, Settings
from megarl.batch import Batch, common_prefix_lengths
from megarl.comm import exchange
from megarl.comm.role_mesh import RoleGroups
from megarl.data.conversations import Encoder
from megarl.data.prompts import Prompt
from megarl.errors import UsageError
from megarl.mcore import device
from megarl.mcore.model import forward_pass
from megarl.observe.timers import Timers
from megarl.roles.frozen_model import FrozenModel

TEXT_FIELDS = ["tokens", "prompt_ids", "prompt_lengths"]  # of a batch of texts, beside their numbers and lengths


class RewardModel:
    """Frozen models with a scalar head over the ranks of the reward role, in whatever layout it has."""

    def __init__(
        self, settings: Settings, role: RoleSettings, role_groups: RoleGroups, encoder: Encoder, folders: list[Path],
        timers: Timers,
    ):  # fmt: skip
        """Builds a model for each folder, with its weights. A collective of the role.

        `folders`: checkpoints of train_reward, checked.
        """
        self.settings, self.role, self.role_groups, self.encoder = settings, role, role_groups, encoder
        self.cut = 0  # texts of the last call, on this lane, that had to be cut
        self.members: list[FrozenModel] = []
        for folder in folders:
            member = FrozenModel(role, role_groups, encoder.tokenizer.vocab_size, timers, value_head=True)
            member.load_pretrained(folder)
            self.members.append(member)

    def prepare(self, prompts: list[Prompt]):
        """Encodes prompts ahead of their responses, while other ranks write these."""
        for prompt in prompts if self.role_groups.is_leader else ():
            self.encoder.prompt(prompt)

    def scores(self, texts: list[tuple[Prompt, str]] | None) -> Tensor:
        """[K, N] fp64 scores of the lane's texts by each model, on every rank of the lane. A collective of the role.

        `texts`: prompts and responses, on the lane's leader; it tokenizes them once for all.

        Raises:
            RuntimeError: a score that is no finite number: weights that are broken, which no fall-back would mend.
        """
        batch = exchange.broadcast_in_replica(self._read(texts), TEXT_FIELDS, self.role_groups)
        found = torch.stack([_scores(batch, member) for member in self.members])
        if not found.isfinite().all():
            broken = int((~found.isfinite()).sum())
            raise RuntimeError(f"--reward-model: {broken} of {found.numel()} scores are no finite numbers")
        return found

    def _read(self, texts: list[tuple[Prompt, str]] | None) -> Batch | None:
        if texts is None:
            return None
        try:
            read = self.encoder.scored_batch(texts, self.role.megatron.seq_length)
        except UsageError as error:  # the template took every prompt at the start, and now refuses a response
            raise RuntimeError(str(error)) from error
        self.cut = sum(cut > 0 for _, cut in read)
        prompts = torch.tensor([prompt.index for prompt, _ in texts], dtype=torch.int64)
        batch = Batch(
            sequence_ids=torch.arange(len(read)),
            prompt_ids=prompts,
            prompt_lengths=common_prefix_lengths([ids for ids, _ in read], prompts),
            lengths=torch.tensor([len(ids) for ids, _ in read], dtype=torch.int64),
            tokens=torch.tensor([token for ids, _ in read for token in ids], dtype=torch.int64),
        )
        return batch.to(device.device())

    def metrics(self) -> dict[str, int]:
        """Host memory of offloaded models."""
        found = [member.offload.metrics(self.role.name) for member in self.members]
        return {name: sum(each[name] for each in found) for name in found[0]}

    def combined(self, scores: Tensor) -> Tensor:
        """[K, N] -> [N] by `--reward-ensemble`."""
        return combine(scores, self.settings.reward_ensemble)


def _scores(batch: Batch, member: FrozenModel) -> Tensor:
    """[N] fp64 scores of a batch of texts by one model."""
    found = torch.zeros(len(batch), dtype=torch.float64, device=batch.tokens.device)
    for scores, places in member.forward_only(batch, _forward):
        if len(places):
            found[places] = scores.double()
    return found


def _forward(chunk, part: Batch) -> Tensor:
    return forward_pass.sequence_scores(
        chunk, part.tokens, part.host_metadata.lengths, part.routing, part.host_metadata.shared
    )
