"""Training on preferences: of a policy on pairs (DPO and its relatives) or on single responses with a label each (KTO),
and of a reward model on pairs."""

import abc
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from megarl.algorithms import PREFERENCE_LOSSES
from megarl.algorithms.aggregation import masked_sum
from megarl.algorithms.packed import response_counts, sums_by_sequence
from megarl.algorithms.preference_losses import (
    PAIR_METRICS,
    PairLogprobs,
    bradley_terry,
    kto,
    mismatched_divergence,
    pair_metrics,
)
from megarl.arguments import RunConfig
from megarl.batch import Batch
from megarl.checkpoint import resume
from megarl.data.columns import LABELLED, REWARD
from megarl.data.conversations import Encoder
from megarl.data.examples import Examples, LabelledResponses, preference_pairs, response_pairs
from megarl.data.prompts import PromptSet
from megarl.errors import UsageError, flag_of
from megarl.flags.preferences import preference_options
from megarl.mcore import device
from megarl.mcore.model import forward_pass
from megarl.mcore.model.gpt import value_head_of
from megarl.mcore.weights.checkpoint_files import load_plain
from megarl.observe.terminal import PREFERENCE_FIELDS, REWARD_FIELDS
from megarl.roles.passes import policy_scores, sequence_scores
from megarl.trainers.prompt_inputs import EVAL_PROMPTS, PROMPTS
from megarl.trainers.supervised_trainer import ExampleBatch, SupervisedInputs, SupervisedTrainer

REFERENCE_FILE = "reference_logprobs.pt"  # in a checkpoint


class PairwiseTrainer(SupervisedTrainer):
    """Trains on pairs of a chosen and a rejected response, whose sequences are adjacent in a micro-batch."""

    sequences_together = 2

    @abc.abstractmethod
    def _known(self, pairs: ExampleBatch, set_name: str) -> Tensor:
        """What the loss reads of each pair besides the model's output, by the pair's number in the batch."""

    @abc.abstractmethod
    def _measure(self, scores: Any, microbatch: Batch, known: Tensor) -> tuple[Tensor, Tensor]:
        """(sum of the pairs' losses, float64 sums of `metric_names`) of a micro-batch. `known`: of `_known`."""

    def _margins(self, pairs: ExampleBatch, dtype: torch.dtype) -> Tensor:
        """[P] by number in the batch."""
        margins = pairs.source.margins[list(pairs.lines)] + self.settings.preference_margin
        return torch.from_numpy(margins).to(device.device(), dtype)

    def loss_of(self, examples: ExampleBatch, tokens: Tensor) -> Callable:
        """The mean loss of the pairs."""
        known = self._known(examples, PROMPTS)

        def loss(scores, microbatch):
            total, sums = self._measure(scores, microbatch, known)
            return total / examples.count, (sums / examples.count,)

        return loss

    def evaluate_batch(self, examples: ExampleBatch) -> dict[str, float]:
        """The metrics of `metric_names` of held-out pairs. Collective."""
        sums = torch.zeros(len(self.metric_names), dtype=torch.float64, device=device.device())
        known = self._known(examples, EVAL_PROMPTS)
        for scores, part in self.outputs(examples.batch):
            sums += self._measure(scores, part, known)[1]
        means = (self.role_groups.dp_all_reduce(sums) / examples.count).tolist()
        return {f"eval/{name}": mean for name, mean in zip(self.metric_names, means, strict=True)}


class PreferenceTrainer(SupervisedTrainer):
    """Trains a policy on preferences. Its role is the actor, so that train_rl can start from it.

    The reference is the policy that the run starts from. Its log-probs of all examples are computed once, before the
    first step, and are part of each checkpoint, so that no second model is kept.
    """

    program = "train_preference"
    fields = PREFERENCE_FIELDS
    examples_of: ClassVar[Callable[..., Examples]]

    @classmethod
    def read(cls, prompts: PromptSet, encoder: Encoder, config: RunConfig) -> Examples:
        """The examples of a file, with a note if they have margins that the run's loss does not read."""
        s, loss = config.settings, PREFERENCE_LOSSES[config.settings.preference_loss]
        prompt_limit, response_limit = s.max_prompt_length, s.max_response_length
        examples = cls.examples_of(prompts, encoder, prompt_limit, response_limit, s.filter_long_prompts)
        if examples.margins.any() and not loss.reads_margin:
            examples.prompts = examples.prompts.noted(f"--preference-loss {loss.name} does not read the column margin")
        return examples

    @staticmethod
    def check_resumed(config: RunConfig, inputs: SupervisedInputs):
        """UsageError if the checkpoint lacks the reference's log-probs of the run's pairs."""
        loss = PREFERENCE_LOSSES[config.settings.preference_loss]
        if not loss.needs_reference:
            return
        path = inputs.resume / REFERENCE_FILE
        advice = "start a new run from it with --pretrained-checkpoint"
        if not path.exists():
            raise UsageError(
                f"--preference-loss {loss.name}: {inputs.resume} has no log-probs of a reference, which only a "
                f"run with such a loss computes at its start; {advice}"
            )
        if changed := resume.changed_data(inputs.manifest, inputs.data):
            raise UsageError(
                f"--load {inputs.resume}: {flag_of(changed[0])} has changed, and the reference's log-probs of "
                f"new pairs need the weights that the run began with; {advice}"
            )
        known, wanted = len(read_reference(path)[EVAL_PROMPTS]), len(inputs.held_out[: config.settings.eval_samples])
        if known < wanted:
            raise UsageError(
                f"--eval-samples {config.settings.eval_samples}: the checkpoint has the reference's log-probs of "
                f"{known} held-out pairs; allowed is at most that number"
            )

    def prepare(self):
        """Computes the reference's log-probs, or reads those of the checkpoint to resume from. Collective."""
        s, self._reference = self.settings, {}
        self._loss = PREFERENCE_LOSSES[s.preference_loss]
        self._options = preference_options(s)
        if not self._loss.needs_reference:
            return
        if self.inputs.resume:
            self._reference = read_reference(self.inputs.resume / REFERENCE_FILE)
            return
        with self.timers.phase(self.trained_role, "reference"):
            held_out = self.inputs.held_out
            self._reference = {
                PROMPTS: self._logprobs(self.inputs.examples, len(self.inputs.examples)),
                EVAL_PROMPTS: self._logprobs(held_out, len(held_out[: s.eval_samples])),
            }

    def files(self) -> dict[str, bytes]:
        """The reference's log-probs, from rank 0."""
        if not self._reference or self.mesh.rank:
            return {}
        file = io.BytesIO()
        torch.save(self._reference, file)
        return {REFERENCE_FILE: file.getvalue()}

    def _logprobs(self, examples: Examples, count: int) -> Tensor:
        """[count, 2] float64 on the host: Σ log π of chosen and rejected of the first examples. Collective."""
        found = torch.zeros(count, 2, dtype=torch.float64, device=device.device())
        size = self.role.megatron.global_batch_size
        for start in range(0, count, size):
            batch = self._batch_of(examples, range(start, min(start + size, count)))
            for scores, part in self.outputs(batch.batch):
                ids = part.sequence_ids
                found[start + ids // 2, ids % 2] = response_sums(scores, part)
        return self.role_groups.dp_all_reduce(found).cpu()

    def _forward(self, chunk, microbatch: Batch) -> forward_pass.TokenScores:
        return policy_scores(chunk, microbatch, 1.0, self.vocab_size)

    def _reference_of(self, examples: ExampleBatch, set_name: str) -> Tensor:
        """[N, 2] float64 Σ log π_ref of both sequences, by number in the batch; zeros if the loss needs none."""
        if not self._reference:
            return torch.zeros(examples.count, 2, dtype=torch.float64, device=device.device())
        return self._reference[set_name][torch.tensor(list(examples.lines))].to(device.device())


class PairTrainer(PairwiseTrainer, PreferenceTrainer):
    """Trains a policy to prefer the chosen response of each pair."""

    purpose, examples_of = REWARD, response_pairs
    sequence_names = ("chosen", "rejected")
    metric_names = PAIR_METRICS  # means over pairs

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
            chosen=chosen,
            rejected=rejected,
            chosen_tokens=chosen_tokens,
            rejected_tokens=rejected_tokens,
            reference_chosen=reference_chosen,
            reference_rejected=reference_rejected,
            margin=margin,
        )
        terms = self._loss.function(pairs, self._options)
        sums = [masked_sum(values, is_pair) for values in pair_metrics(pairs, terms)]
        return masked_sum(terms.loss, is_pair), torch.stack(sums)


def response_sums(scores: forward_pass.TokenScores, batch: Batch) -> Tensor:
    """[N] float64 Σ log π over the response tokens of each sequence."""
    return sums_by_sequence(scores.logprobs.double(), batch.response_mask, batch.cu_seqlens)


def read_reference(path: Path) -> dict[str, Tensor]:
    """The reference's log-probs of a checkpoint, by set. UsageError for a damaged file."""
    found = load_plain(path.read_bytes(), f"--load {path}")
    sets = found if isinstance(found, dict) else {}
    if not all(isinstance(sets.get(n), Tensor) and sets[n].shape[1:] == (2,) for n in (PROMPTS, EVAL_PROMPTS)):
        raise UsageError(f"--load {path}: holds no log-probs of a reference")
    return sets


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
        for scores, part in self.outputs(_part(examples.batch, _MISMATCHED)):
            drift += (response_sums(scores, part) - known[part.sequence_ids // 2, _MISMATCHED]).sum()
        total = self.role_groups.dp_all_reduce(drift)
        return mismatched_divergence(total, total.new_tensor(examples.count))

    def _terms(self, sums: Tensor, part: Batch, known: Tensor, labels: Tensor):
        """(loss of these responses, their part of the means of `metric_names`)."""
        is_response = response_counts(part.response_mask, part.cu_seqlens) > 0  # False in a padding micro-batch
        numbers = part.sequence_ids // 2
        is_desirable = labels[numbers]
        losses, rewards = kto(sums, known[numbers, _OWN], is_desirable, self._divergence, self._options)
        is_right = (rewards > self._options.beta * self._divergence) == is_desirable
        liked, disliked = is_response & is_desirable, is_response & ~is_desirable
        found = [
            masked_sum(losses.detach(), is_response),
            masked_sum(is_right.double(), is_response),
            masked_sum(rewards, liked),
            masked_sum(rewards, disliked),
            masked_sum(sums.detach(), liked),
            masked_sum(sums.detach(), disliked),
        ]
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
        for scores, part in self.outputs(_part(examples.batch, _OWN)):
            means += self._terms(response_sums(scores, part), part, known, labels)[1]
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
    return batch.select((batch.sequence_ids % 2 == which).nonzero().flatten())


# -- reward models -------------------------------------------------------------------------------------------------

# Reward model training on preference pairs: Bradley-Terry loss, accuracy on held-out pairs.


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
