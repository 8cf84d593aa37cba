"""Training of a policy on pairs of a chosen and a rejected response: the loss, accuracy on held-out pairs."""

from collections.abc import Callable

import torch
from torch import Tensor

from megarl.algorithms.aggregation import masked_sum
from megarl.algorithms.packed import response_counts
from megarl.algorithms.preference_loss import PAIR_METRICS, PairLogprobs, pair_metrics
from megarl.arguments import RunConfig
from megarl.batch import Batch
from megarl.data.columns import REWARD
from megarl.data.conversations import Encoder
from megarl.data.prompts import PromptSet
from megarl.data.response_pairs import ResponsePair, ResponsePairs
from megarl.mcore import device
from megarl.mcore.model import forward_pass
from megarl.trainers.preference_trainer import (
    PreferenceTrainer,
    note_unread_margins,
    preference_task,
    response_sums,
)
from megarl.trainers.prompt_inputs import EVAL_PROMPTS, PROMPTS
from megarl.trainers.supervised_trainer import ExampleBatch


class PairTrainer(PreferenceTrainer):
    """Trains a policy to prefer the chosen response of each pair."""

    task = preference_task(REWARD, ("chosen", "rejected"))
    sequences_together = 2
    metric_names = PAIR_METRICS  # means over pairs

    @staticmethod
    def read(prompts: PromptSet, encoder: Encoder, config: RunConfig) -> ResponsePairs:
        """The pair of each line."""
        s = config.settings
        pairs = ResponsePairs(prompts, encoder, s.max_prompt_length, s.max_response_length, s.filter_long_prompts)
        note_unread_margins(pairs, s)
        return pairs

    @staticmethod
    def sequences(example: ResponsePair) -> list[tuple[list[int], list[bool]]]:
        """The chosen and the rejected sequence, each with the mask of its response."""
        return [example.chosen, example.rejected]

    def _known(self, pairs: ExampleBatch, set_name: str) -> Tensor:
        return torch.cat([self._reference_of(pairs, set_name), self._margins(pairs).unsqueeze(1)], 1)

    def _margins(self, pairs: ExampleBatch) -> Tensor:
        """[P] float64 by number in the batch; only those of this replica's pairs are set."""
        margins = torch.zeros(pairs.count, dtype=torch.float64)
        for number, pair in pairs.examples.items():
            margins[number] = pair.margin + self.settings.preference_margin
        return margins.to(device.device())

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

    def loss_of(self, examples: ExampleBatch, tokens: Tensor) -> Callable:
        """The mean loss of the pairs."""
        known = self._known(examples, PROMPTS)

        def loss(scores, microbatch):
            total, sums = self._measure(scores, microbatch, known)
            return total / examples.count, (sums / examples.count,)

        return loss

    def evaluate_batch(self, examples: ExampleBatch) -> dict[str, float]:
        """The metrics of `metric_names` of held-out pairs. Collective."""
        known = self._known(examples, EVAL_PROMPTS)
        sums = torch.zeros(len(self.metric_names), dtype=torch.float64, device=device.device())
        for scores, positions in self.trainable_model.forward_only(self.microbatches(examples.batch), self._forward):
            if len(positions):
                sums += self._measure(scores, examples.batch.select(positions), known)[1]
        means = (self.role_groups.dp_all_reduce(sums) / examples.count).tolist()
        return {f"eval/{name}": mean for name, mean in zip(self.metric_names, means, strict=True)}
