"""Training of a policy on single responses with a label each (KTO)."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from megarl.algorithms.aggregation import masked_sum
from megarl.algorithms.packed import response_counts
from megarl.algorithms.preference_losses.kto import kto, mismatched_divergence
from megarl.batch import Batch
from megarl.data.columns import LABELLED
from megarl.data.labelled_responses import LabelledResponses
from megarl.mcore import device
from megarl.mcore.model import forward_pass
from megarl.trainers.preference_trainer import PreferenceTrainer, response_sums
from megarl.trainers.prompt_inputs import EVAL_PROMPTS, PROMPTS
from megarl.trainers.supervised_trainer import ExampleBatch

_OWN, _MISMATCHED = 0, 1  # sequence of an example: its id modulo 2


class KTOTrainer(PreferenceTrainer):
    """Trains a policy to make desirable responses more likely, and others less.

    An example has a second sequence, its prompt with a response to another prompt, on which the divergence of the
    policy from its reference is estimated before each update.
    """

    purpose, examples_of = LABELLED, LabelledResponses
    sequence_names = ("response", "mismatched")
    # In the order of `_measure`: means over all responses, desirable ones and undesirable ones.
    metric_names = ("loss", "accuracy", "chosen_reward", "rejected_reward", "chosen_logprob", "rejected_logprob")

    def update(self, examples: ExampleBatch):
        """One optimizer update on the mean loss of the responses; sets `metrics`."""
        with self.timers.phase(self.trained_role, "divergence"):
            self._divergence = self._estimate_divergence(examples, PROMPTS)
        super().update(examples._replace(batch=_part(examples.batch, _OWN)))
        self.metrics = self._named(self.metrics, "preference", _counts(self._labels(examples)))

    def _estimate_divergence(self, examples: ExampleBatch, set_name: str) -> Tensor:
        """[] float64, on every rank of the role. Collective."""
        drift = torch.zeros((), dtype=torch.float64, device=device.device())
        known = self._reference_of(examples, set_name)
        for part, sums in self._sums_without_gradient(_part(examples.batch, _MISMATCHED)):
            drift += (sums - known[part.sequence_ids // 2, _MISMATCHED]).sum()
        total = self.role_groups.dp_all_reduce(drift)
        return mismatched_divergence(total, total.new_tensor(examples.count))

    def _sums_without_gradient(self, batch: Batch) -> Iterator[tuple[Batch, Tensor]]:
        """(sequences, Σ log π of their responses) of each micro-batch."""
        for scores, positions in self.trainable_model.forward_only(self.microbatches(batch), self._forward):
            if len(positions):
                part = batch.select(positions)
                yield part, response_sums(scores, part)

    def _terms(self, sums: Tensor, part: Batch, known: Tensor, labels: Tensor):
        """(loss of these responses, their part of the means of `metric_names`)."""
        is_response = response_counts(part.response_mask, part.cu_seqlens) > 0  # False in a padding micro-batch
        numbers = part.sequence_ids // 2
        is_desirable = labels[numbers]
        losses, rewards = kto(sums, known[numbers, _OWN], is_desirable, self._divergence, self._options)
        is_right = (rewards > self._options.beta * self._divergence) == is_desirable
        liked, disliked = is_response & is_desirable, is_response & ~is_desirable
        found = [
            masked_sum(losses.detach(), is_response), masked_sum(is_right.double(), is_response),
            masked_sum(rewards, liked), masked_sum(rewards, disliked),
            masked_sum(sums.detach(), liked), masked_sum(sums.detach(), disliked),
        ]  # fmt: skip
        return masked_sum(losses, is_response) / len(labels), torch.stack(found) / _counts(labels).clamp(min=1)

    def _labels(self, examples: ExampleBatch) -> Tensor:
        """[N] bool of all responses of the batch, by number: whether they are desirable."""
        return torch.from_numpy(examples.source.labels[list(examples.lines)]).to(device.device())

    def loss_of(self, examples: ExampleBatch, tokens: Tensor) -> Callable:
        """The mean loss of the responses."""
        known, labels = self._reference_of(examples, PROMPTS), self._labels(examples)

        def loss(scores: forward_pass.TokenScores, microbatch: Batch):
            value, means = self._terms(response_sums(scores, microbatch), microbatch, known, labels)
            return value, (means,)

        return loss

    def evaluate_batch(self, examples: ExampleBatch) -> dict[str, float]:
        """The metrics of `metric_names` of held-out responses. Collective."""
        self._divergence = self._estimate_divergence(examples, EVAL_PROMPTS)
        known, labels = self._reference_of(examples, EVAL_PROMPTS), self._labels(examples)
        means = torch.zeros(len(self.metric_names), dtype=torch.float64, device=device.device())
        for part, sums in self._sums_without_gradient(_part(examples.batch, _OWN)):
            means += self._terms(sums, part, known, labels)[1]
        found = dict(zip(self.metric_names, self.role_groups.dp_all_reduce(means).tolist(), strict=True))
        return self._named({f"eval/{name}": mean for name, mean in found.items()}, "eval", _counts(labels))

    def _named(self, metrics: dict[str, float], prefix: str, counts: Tensor) -> dict[str, float]:
        """Without the means over no response; with the divergence, and the margin between the mean rewards."""
        empty = {f"{prefix}/{name}" for name, n in zip(self.metric_names, counts.tolist(), strict=True) if not n}
        found = {name: value for name, value in metrics.items() if name not in empty}
        found[f"{prefix}/kl"] = float(self._divergence)
        chosen, rejected = (found.get(f"{prefix}/{name}_reward") for name in ("chosen", "rejected"))
        return found | ({} if chosen is None or rejected is None else {f"{prefix}/margin": chosen - rejected})


def _counts(labels: Tensor) -> Tensor:
    """[M] float64: of how many responses each of `KTOTrainer.metric_names` is the mean."""
    desirable, undesirable = labels.sum(), (~labels).sum()
    return torch.stack([desirable + undesirable] * 2 + [desirable, undesirable] * 2).double()


def _part(batch: Batch, which: int) -> Batch:
    """The own or the mismatched sequences of a batch."""
    return batch.select((batch.sequence_ids % 2 == which).nonzero().flatten())
