"""Training of a policy on pairs of a chosen and a rejected response: the loss, accuracy on held-out pairs."""

import torch
from torch import Tensor

from megarl.algorithms.aggregation import masked_sum
from megarl.algorithms.packed import response_counts
from megarl.algorithms.preference_loss import PAIR_METRICS, PairLogprobs, pair_metrics
from megarl.arguments import RunConfig
from megarl.batch import Batch
from megarl.data.columns import REWARD
from megarl.data.conversations import Encoder
from megarl.data.examples import Examples
from megarl.data.preferences import response_pairs
from megarl.data.prompts import PromptSet
from megarl.mcore.model import forward_pass
from megarl.trainers.preference_trainer import (
    PreferenceTrainer,
    note_unread_margins,
    preference_task,
    response_sums,
)
from megarl.trainers.supervised_trainer import ExampleBatch, PairwiseTrainer


class PairTrainer(PairwiseTrainer, PreferenceTrainer):
    """Trains a policy to prefer the chosen response of each pair."""

    task = preference_task(REWARD, ("chosen", "rejected"))
    metric_names = PAIR_METRICS  # means over pairs

    @staticmethod
    def read(prompts: PromptSet, encoder: Encoder, config: RunConfig) -> Examples:
        s = config.settings
        pairs = response_pairs(prompts, encoder, s.max_prompt_length, s.max_response_length, s.filter_long_prompts)
        note_unread_margins(pairs, s)
        return pairs

    def _known(self, pairs: ExampleBatch, set_name: str) -> Tensor:
        return torch.cat([self._reference_of(pairs, set_name), self._margins(pairs, torch.float64).unsqueeze(1)], 1)

    def _measure(self, scores: forward_pass.TokenScores, microbatch: Batch, known: Tensor) -> tuple[Tensor, Tensor]:
        """(sum of the pairs' losses, float64 sums of `metric_names`) of a micro-batch, in which pairs are adjacent.

        `known`: [P, 3] Σ log π_ref of chosen and rejected, and margin, of the batch's pairs.
        """
        counts = response_counts(microbatch.response_mask, microbatch.cu_seqlens).view(-1, 2)
        is_pair = counts[:, 0] > 0  # False in a padding micro-batch
        chosen, rejected = response_sums(scores, microbatch).view(-1, 2).unbind(1)
        reference_chosen, reference_rejected, margin = known[microbatch.sequence_ids[::2] // 2].unbind(1)
        chosen_tokens, rejected_tokens = counts.clamp(min=1).double().unbind(1)
        pairs = PairLogprobs(
            chosen=chosen, rejected=rejected, chosen_tokens=chosen_tokens, rejected_tokens=rejected_tokens,
            reference_chosen=reference_chosen, reference_rejected=reference_rejected, margin=margin,
        )  # fmt: skip
        terms = self._loss.function(pairs, self._options)
        sums = [masked_sum(values, is_pair) for values in pair_metrics(pairs, terms)]
        return masked_sum(terms.loss, is_pair), torch.stack(sums)
