"""Reward model training on preference pairs: Bradley-Terry loss, accuracy on held-out pairs."""

import torch
from torch import Tensor

from megarl.algorithms.aggregation import masked_sum
from megarl.algorithms.preference_losses import bradley_terry
from megarl.arguments import RunConfig
from megarl.batch import Batch
from megarl.data.columns import REWARD
from megarl.data.conversations import Encoder
from megarl.data.examples import Examples, preference_pairs
from megarl.data.prompts import PromptSet
from megarl.mcore.model.gpt import value_head_of
from megarl.observe.terminal import REWARD_FIELDS
from megarl.roles.passes import sequence_scores
from megarl.trainers.supervised_trainer import ExampleBatch, PairwiseTrainer


class RewardModelTrainer(PairwiseTrainer):
    """Trains a language model with a scalar head to score the chosen response above the rejected one."""

    program, trained_role, sources = "train_reward", "reward", ("actor", "reward")
    purpose, sequence_names = REWARD, ("chosen", "rejected")
    metric_names = ("loss", "accuracy", "margin", "mean")  # means over pairs, in the order of `_measure`
    fields = REWARD_FIELDS

    @staticmethod
    def read(prompts: PromptSet, encoder: Encoder, config: RunConfig) -> Examples:
        max_length = config.roles["reward"].megatron.seq_length
        return preference_pairs(prompts, encoder, max_length, config.settings.filter_long_prompts)

    def prepare(self):
        for chunk in self.trainable_model.model:
            if (head := value_head_of(chunk)) is not None:
                head.trains_bias = self.settings.centring_coefficient > 0

    def _forward(self, chunk, microbatch) -> Tensor:
        return sequence_scores(chunk, microbatch)

    def _known(self, pairs: ExampleBatch, set_name: str) -> Tensor:
        return self._margins(pairs, torch.float32)

    def _measure(self, scores: Tensor, microbatch: Batch, known: Tensor) -> tuple[Tensor, Tensor]:
        """(sum of the pairs' losses, float64 [4] sums of `metric_names`) of a micro-batch.

        Args:
            scores: [N] of its sequences; those of a pair are adjacent.
            known: [P] margins of the batch's pairs.
        """
        chosen, rejected = scores.view(-1, 2).unbind(1)
        last_tokens = microbatch.cu_seqlens[1:] - 1
        is_pair = microbatch.response_mask[last_tokens].view(-1, 2)[:, 0]  # False in a padding micro-batch
        margin = known[microbatch.sequence_ids[::2] // 2]
        terms = bradley_terry(chosen, rejected, margin, self.settings.centring_coefficient)
        chosen, rejected = chosen.detach().double(), rejected.detach().double()
        measured = (terms.detach().double(), (chosen > rejected).double(), chosen - rejected, (chosen + rejected) / 2)
        return masked_sum(terms, is_pair), torch.stack([masked_sum(values, is_pair) for values in measured])
