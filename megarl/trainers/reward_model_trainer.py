"""Reward model training on preference pairs: Bradley-Terry loss, accuracy on held-out pairs."""

from collections.abc import Callable

import torch
from torch import Tensor

from megarl.algorithms.aggregation import masked_sum
from megarl.algorithms.preference_loss import bradley_terry
from megarl.arguments import RunConfig, Settings
from megarl.batch import Batch
from megarl.data.columns import REWARD
from megarl.data.conversations import Encoder
from megarl.data.examples import Examples
from megarl.data.preferences import Pair, preference_pairs
from megarl.data.prompts import PromptSet
from megarl.mcore import device
from megarl.mcore.model import forward_pass
from megarl.observe.progress import REWARD_FIELDS
from megarl.trainers.supervised_trainer import ExampleBatch, SupervisedTrainer, TaskSpec, check_target_accuracy


class RewardModelTrainer(SupervisedTrainer):
    """Trains a language model with a scalar head to score the chosen response above the rejected one."""

    task = TaskSpec(
        program="train_reward", role="reward", prefix="reward", value_head=True,
        sequence_names=("chosen", "rejected"), best="accuracy", sources=("actor", "reward"), purpose=REWARD,
    )  # fmt: skip
    sequences_together = 2
    metric_names = ("loss", "accuracy", "margin", "mean")  # means over pairs, in the order of `_measure`
    fields = REWARD_FIELDS

    @staticmethod
    def read(prompts: PromptSet, encoder: Encoder, config: RunConfig) -> Examples:
        """The pair of each line."""
        max_length = config.roles["reward"].megatron.seq_length
        return preference_pairs(prompts, encoder, max_length, config.settings.filter_long_prompts)

    @staticmethod
    def check(settings: Settings):
        """The checks of `SupervisedTrainer`, and that a target accuracy has evaluations."""
        SupervisedTrainer.check(settings)
        check_target_accuracy(settings)

    @staticmethod
    def sequences(example: Pair) -> list[tuple[list[int], list[bool]]]:
        """The chosen and the rejected sequence. Only the last token counts, where the score is read."""
        pair = (example.chosen, example.rejected)
        return [(tokens, [False] * (len(tokens) - 1) + [True]) for tokens in pair]

    def has_reached_target(self) -> bool:
        """Whether the run has reached its target loss or its target accuracy on held-out pairs."""
        target = self.settings.target_eval_accuracy
        return super().has_reached_target() or target is not None and self.metrics["eval/accuracy"] >= target

    def _forward(self, chunk, microbatch) -> Tensor:
        metadata = microbatch.host_metadata
        return forward_pass.sequence_scores(
            chunk, microbatch.tokens, metadata.lengths, microbatch.routing, metadata.shared
        )

    def _margins(self, pairs: ExampleBatch) -> Tensor:
        """[P] by number in the batch; only those of this replica's pairs are set."""
        margins = torch.zeros(pairs.count)
        for number, pair in pairs.examples.items():
            margins[number] = pair.margin + self.settings.preference_margin
        return margins.to(device.device())

    def _measure(self, scores: Tensor, microbatch: Batch, margins: Tensor) -> tuple[Tensor, Tensor]:
        """(sum of the pairs' losses, float64 [4] sums of `metric_names`) of a micro-batch.

        Args:
            scores: [N] of its sequences; those of a pair are adjacent.
            margins: [P] of the batch's pairs (`_margins`).
        """
        chosen, rejected = scores.view(-1, 2).unbind(1)
        last_tokens = microbatch.cu_seqlens[1:] - 1
        is_pair = microbatch.response_mask[last_tokens].view(-1, 2)[:, 0]  # False in a padding micro-batch
        margin = margins[microbatch.sequence_ids[::2] // 2]
        terms = bradley_terry(chosen, rejected, margin, self.settings.centring_coefficient)
        chosen, rejected = chosen.detach().double(), rejected.detach().double()
        measured = (terms.detach().double(), (chosen > rejected).double(), chosen - rejected, (chosen + rejected) / 2)
        return masked_sum(terms, is_pair), torch.stack([masked_sum(values, is_pair) for values in measured])

    def loss_of(self, examples: ExampleBatch, tokens: Tensor) -> Callable:
        """The mean loss of the pairs."""
        margins = self._margins(examples)

        def loss(scores, microbatch):
            total, sums = self._measure(scores, microbatch, margins)
            return total / examples.count, (sums / examples.count,)

        return loss

    def evaluate_batch(self, examples: ExampleBatch) -> dict[str, float]:
        """Loss, accuracy, margin and mean score of held-out pairs. Collective."""
        sums = torch.zeros(len(self.metric_names), dtype=torch.float64, device=device.device())
        margins = self._margins(examples)
        for scores, positions in self.trainable_model.forward_only(self.microbatches(examples.batch), self._forward):
            if len(positions):
                sums += self._measure(scores, examples.batch.select(positions), margins)[1]
        means = (self.role_groups.dp_all_reduce(sums) / examples.count).tolist()
        return {f"eval/{name}": mean for name, mean in zip(self.metric_names, means, strict=True)}
