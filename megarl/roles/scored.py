"""What the reward role says about responses: one record from the verifiers to the batch."""

from typing import NamedTuple

import torch
from torch import Tensor

from megarl.arguments import Settings
from megarl.batch import Batch
from megarl.roles.loss_mask import valid_sequences, without_unscored


class Scored(NamedTuple):
    """The scores of N responses, or of groups of them with one more dimension."""

    reward: Tensor  # [N] float64
    correct: Tensor  # [N] bool
    counts: Tensor  # [N] bool: it has a score
    parts: Tensor  # [N, K] float64 parts of the reward before their weights; K is 0 if there are not several

    @classmethod
    def of_rows(cls, rows: Tensor) -> "Scored":
        """From `rows`: [N, 3 + K] float64."""
        return cls(rows[..., 0], rows[..., 1] > 0, rows[..., 2] > 0, rows[..., 3:])

    @classmethod
    def of_batch(cls, batch: Batch, settings: Settings) -> "Scored":
        """From the fields of a batch that is scored."""
        parts = batch.scores.new_zeros(len(batch), 0) if batch.reward_parts is None else batch.reward_parts
        return cls(batch.scores.double(), batch.correct, valid_sequences(batch, settings), parts.double())

    def rows(self) -> Tensor:
        """[N, 3 + K] float64, in which ranks exchange them."""
        columns = (column.double() for column in (self.reward, self.correct, self.counts))
        return torch.cat([torch.stack([*columns], dim=-1), self.parts], dim=-1)

    def fill(self, batch: Batch, drops: bool):
        """Sets the fields of a batch. `drops`: a response without a score loses its response tokens."""
        batch.scores, batch.correct = self.reward.float(), self.correct
        if self.parts.shape[-1]:
            batch.reward_parts = self.parts.float()
        if drops:
            batch.response_mask = without_unscored(batch, self.counts)


def no_rows(count: int, settings: Settings, device) -> Tensor:
    """[count, 3 + K] zeros for `Scored.rows`, of responses that another rank scores."""
    return torch.zeros(count, 3 + len(settings.part_weights), dtype=torch.float64, device=device)
