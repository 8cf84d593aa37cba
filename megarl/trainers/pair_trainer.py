"""Training of a policy on pairs of a chosen and a rejected response: the loss, accuracy on held-out pairs."""

import torch
from torch import Tensor

from megarl.algorithms.aggregation import masked_sum
from megarl.algorithms.packed import response_counts
from megarl.algorithms.preference_loss import PAIR_METRICS, PairLogprobs, pair_metrics
from megarl.batch import Batch
from megarl.data.columns import REWARD
from megarl.data.response_pairs import ResponsePair, ResponsePairs
from megarl.mcore.model import forward_pass
from megarl.trainers.preference_trainer import PreferenceTrainer, response_sums
from megarl.trainers.supervised_trainer import ExampleBatch, PairwiseTrainer


class PairTrainer(PairwiseTrainer, PreferenceTrainer):
    """Trains a policy to prefer the chosen response of each pair."""

    purpose, examples_type = REWARD, ResponsePairs
    sequence_names = ("chosen", "rejected")
    metric_names = PAIR_METRICS  # means over pairs

    @staticmethod
    def sequences(example: ResponsePair) -> list[tuple[list[int], list[bool]]]:
        """The chosen and the rejected sequence, each with the mask of its response."""
        return [example.chosen, example.rejected]

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
