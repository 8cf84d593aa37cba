"""A reward model or ensemble, which encodes prompts and responses with its own tokenizer and chat template."""

import torch
from torch import Tensor

from megarl.arguments import RoleSettings
from megarl.batch import Batch, common_prefix_lengths
from megarl.checkpoint.pretrained import PretrainedWeights
from megarl.comm import exchange
from megarl.comm.role_mesh import RoleGroups
from megarl.data.conversations import Encoder
from megarl.data.prompt import Prompt
from megarl.errors import UsageError
from megarl.mcore import device
from megarl.observe.timers import Timers
from megarl.roles.frozen_model import FrozenModel
from megarl.roles.passes import sequence_scores

TEXT_FIELDS = ["tokens", "prompt_ids", "prompt_lengths"]  # of a batch to score, besides sequence ids and lengths


class RewardModel:
    """Frozen models with a scalar head on the ranks of the reward role."""

    def __init__(
        self,
        role: RoleSettings,
        role_groups: RoleGroups,
        encoder: Encoder,
        weights: list[PretrainedWeights],
        timers: Timers,
    ):
        """Builds a model for each of `weights` and loads them. A collective of the role."""
        self.role, self.role_groups = role, role_groups
        self.encoder = encoder
        self.cut = 0  # truncated texts of the last call on this replica
        self.members: list[FrozenModel] = []
        vocab_size = role.model_vocab_size(encoder.tokenizer.vocab_size)
        for of_member in weights:
            member = FrozenModel(role, role_groups, vocab_size, timers)
            member.load_pretrained(of_member)
            self.members.append(member)

    def prepare(self, prompts: list[Prompt]):
        """Encodes prompts in advance, while other ranks generate the responses."""
        for prompt in prompts if self.role_groups.is_leader else ():
            self.encoder.prompt(prompt)

    def scores(self, texts: list[tuple[Prompt, str]] | None) -> Tensor:
        """[K, N] float64 scores of the replica's texts by each model, on all its ranks. A collective of the role.

        `texts`: prompts and responses, on the replica's leader, which encodes them once for all models.

        Raises:
            RuntimeError: a score is not finite, because the weights are broken.
        """
        batch = exchange.broadcast_in_replica(self._read(texts), TEXT_FIELDS, self.role_groups)
        scores = torch.stack([_scores(batch, member) for member in self.members])
        if not scores.isfinite().all():
            broken = int((~scores.isfinite()).sum())
            raise RuntimeError(f"--reward-model: {broken} of {scores.numel()} scores are not finite")
        return scores

    def _read(self, texts: list[tuple[Prompt, str]] | None) -> Batch | None:
        if texts is None:
            return None
        try:
            encoded = self.encoder.reward_model_inputs(texts, self.role.megatron.seq_length)
        except UsageError as error:  # the prompts were checked at startup, so a response does not fit the template
            raise RuntimeError(str(error)) from error
        self.cut = sum(cut > 0 for _, cut in encoded)
        prompts = torch.tensor([prompt.index for prompt, _ in texts], dtype=torch.int64)
        batch = Batch(
            sequence_ids=torch.arange(len(encoded)),
            prompt_ids=prompts,
            prompt_lengths=common_prefix_lengths([ids for ids, _ in encoded], prompts),
            lengths=torch.tensor([len(ids) for ids, _ in encoded], dtype=torch.int64),
            tokens=torch.tensor([token for ids, _ in encoded for token in ids], dtype=torch.int64),
        )
        return batch.to(device.device())

    def metrics(self) -> dict[str, float]:
        """Host memory of offloaded models, in total."""
        by_member = [member.offload.metrics(self.role.name) for member in self.members]
        return {name: sum(metrics[name] for metrics in by_member) for name in by_member[0]}


def _scores(batch: Batch, member: FrozenModel) -> Tensor:
    scores = torch.zeros(len(batch), dtype=torch.float64, device=batch.tokens.device)
    for values, positions in member.forward_only(batch, sequence_scores):
        if len(positions):
            scores[positions] = values.double()
    return scores
