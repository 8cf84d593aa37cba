"""Training of a policy on preference pairs: its reference's log-probs, the loss, accuracy on held-out pairs."""

import io
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from megarl.algorithms.aggregation import masked_sum
from megarl.algorithms.packed import response_counts, sums_by_sequence
from megarl.algorithms.preference_loss import PairLogprobs, PreferenceOptions
from megarl.algorithms.preference_losses import PREFERENCE_LOSSES
from megarl.arguments import RunConfig, Settings
from megarl.batch import Batch
from megarl.checkpoint import folders, resume
from megarl.data.columns import REWARD
from megarl.data.conversations import Encoder
from megarl.data.examples import Examples
from megarl.data.prompts import PromptSet
from megarl.data.response_pairs import ResponsePair, ResponsePairs
from megarl.errors import UsageError
from megarl.mcore import device
from megarl.mcore.model import forward_pass
from megarl.mcore.weights.safe_reading import load_plain
from megarl.observe.progress import PREFERENCE_FIELDS
from megarl.trainers.prompt_inputs import EVAL_PROMPTS, PROMPTS
from megarl.trainers.supervised_trainer import (
    ExampleBatch,
    SupervisedInputs,
    SupervisedTrainer,
    TaskSpec,
    check_target_accuracy,
)

REFERENCE_FILE = "reference_logprobs.pt"  # in a checkpoint


class PreferenceTrainer(SupervisedTrainer):
    """Trains a policy to prefer the chosen response. Its role is the actor, so that train_rl can start from it.

    The reference is the policy that the run starts from. Its log-probs of all pairs are computed once, before the first
    step, and are part of each checkpoint, so that no second model is kept.
    """

    task = TaskSpec(
        program="train_preference", role="actor", prefix="preference", value_head=False, sequences_per_example=2,
        best="accuracy", sources=("actor",), purpose=REWARD,
    )  # fmt: skip
    # Means over pairs, in the order of `_measure`.
    metric_names = (
        "loss", "accuracy", "margin", "chosen_reward", "rejected_reward", "chosen_logprob", "rejected_logprob"
    )  # fmt: skip
    fields = PREFERENCE_FIELDS

    @staticmethod
    def read(prompts: PromptSet, encoder: Encoder, config: RunConfig) -> ResponsePairs:
        """The pair of each line."""
        s = config.settings
        pairs = ResponsePairs(prompts, encoder, s.max_prompt_length, s.max_response_length, s.filter_long_prompts)
        loss = PREFERENCE_LOSSES[s.preference_loss]
        if pairs.has_margins and not loss.reads_margin:
            pairs.prompts = pairs.prompts.noted(f"--preference-loss {loss.name} does not read the margins of the pairs")
        return pairs

    @staticmethod
    def check(settings: Settings):
        """The checks of `SupervisedTrainer`, and that a target accuracy has evaluations."""
        SupervisedTrainer.check(settings)
        check_target_accuracy(settings)

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
        if changed := resume.changed_data(folders.read_manifest(inputs.resume, "--load"), inputs.data):
            raise UsageError(
                f"--load {inputs.resume}: {resume.flag_of(changed[0])} has changed, and the reference's log-probs of "
                f"new pairs need the weights that the run began with; {advice}"
            )
        known, wanted = len(read_reference(path)[EVAL_PROMPTS]), len(inputs.held_out[: config.settings.eval_samples])
        if known < wanted:
            raise UsageError(
                f"--eval-samples {config.settings.eval_samples}: the checkpoint has the reference's log-probs of "
                f"{known} held-out pairs; allowed is at most that number"
            )

    @staticmethod
    def sequences(example: ResponsePair) -> list[tuple[list[int], list[bool]]]:
        """The chosen and the rejected sequence, each with the mask of its response."""
        return [example.chosen, example.rejected]

    def prepare(self):
        """Computes the reference's log-probs, or reads those of the checkpoint to resume from. Collective."""
        s, self._reference = self.settings, {}
        self._loss = PREFERENCE_LOSSES[s.preference_loss]
        self._options = options_of(s)
        if not self._loss.needs_reference:
            return
        if self.inputs.resume:
            self._reference = read_reference(self.inputs.resume / REFERENCE_FILE)
            return
        with self.timers.phase(self.task.role, "reference"):
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

    def has_reached_target(self) -> bool:
        """Whether the run has reached its target loss or its target accuracy on held-out pairs."""
        target = self.settings.target_eval_accuracy
        return super().has_reached_target() or target is not None and self.metrics["eval/accuracy"] >= target

    def _logprobs(self, examples: Examples, count: int) -> Tensor:
        """[count, 2] float64 on the host: Σ log π of chosen and rejected of the first examples. Collective."""
        found = torch.zeros(count, 2, dtype=torch.float64, device=device.device())
        size = self.role.megatron.global_batch_size
        for start in range(0, count, size):
            batch = self._batch_of(examples, range(start, min(start + size, count)))
            for scores, positions in self.trainable_model.forward_only(self.microbatches(batch.batch), self._forward):
                if len(positions):
                    part = batch.batch.select(positions)
                    ids = part.sequence_ids
                    found[start + ids // 2, ids % 2] = _sums(scores, part)
        return self.role_groups.dp_all_reduce(found).cpu()

    def _forward(self, chunk, microbatch: Batch) -> forward_pass.TokenScores:
        host = microbatch.host_metadata
        return forward_pass.token_scores(
            chunk, microbatch.tokens, host.lengths, 1.0, self.vocab_size, microbatch.routing, host.response_mask,
            host.shared,
        )  # fmt: skip

    def _known(self, pairs: ExampleBatch, set_name: str) -> Tensor:
        """[P, 3] float64 by number in the batch: log π_ref of chosen and of rejected, and the margin of each pair."""
        known = torch.zeros(pairs.count, 3, dtype=torch.float64)
        if self._reference:
            known[:, :2] = self._reference[set_name][torch.tensor(list(pairs.lines))]
        for number, pair in pairs.examples.items():
            known[number, 2] = pair.margin + self.settings.preference_margin
        return known.to(device.device())

    def _measure(self, scores: forward_pass.TokenScores, microbatch: Batch, known: Tensor) -> tuple[Tensor, Tensor]:
        """(sum of the pairs' losses, float64 sums of `metric_names`) of a micro-batch, in which pairs are adjacent.

        `known`: of the batch's pairs (`_known`).
        """
        counts = response_counts(microbatch.response_mask, microbatch.cu_seqlens).view(-1, 2)
        is_pair = counts[:, 0] > 0  # False in a padding micro-batch
        chosen, rejected = _sums(scores, microbatch).view(-1, 2).unbind(1)
        reference_chosen, reference_rejected, margin = known[microbatch.sequence_ids[::2] // 2].unbind(1)
        chosen_tokens, rejected_tokens = counts.clamp(min=1).double().unbind(1)
        pairs = PairLogprobs(
            chosen=chosen, rejected=rejected, chosen_tokens=chosen_tokens, rejected_tokens=rejected_tokens,
            reference_chosen=reference_chosen, reference_rejected=reference_rejected, margin=margin,
        )  # fmt: skip
        terms = self._loss.function(pairs, self._options)
        won, lost = terms.chosen_reward, terms.rejected_reward
        measured = terms.loss.detach(), (won > lost).double(), won - lost, won, lost, chosen.detach(), rejected.detach()
        return masked_sum(terms.loss, is_pair), torch.stack([masked_sum(values, is_pair) for values in measured])

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


def _sums(scores: forward_pass.TokenScores, batch: Batch) -> Tensor:
    """[N] float64 Σ log π over the response tokens of each sequence."""
    return sums_by_sequence(scores.logprobs.double(), batch.response_mask, batch.cu_seqlens)


def options_of(settings: Settings) -> PreferenceOptions:
    """The options of the run's loss: values of flags, and the loss's own defaults."""
    s, defaults = settings, PREFERENCE_LOSSES[settings.preference_loss].defaults
    return PreferenceOptions(
        beta=defaults.beta if s.preference_beta is None else s.preference_beta,
        label_smoothing=s.preference_label_smoothing,
        gamma=s.preference_gamma,
        coefficient=defaults.coefficient if s.preference_coefficient is None else s.preference_coefficient,
    )


def read_reference(path: Path) -> dict[str, Tensor]:
    """The reference's log-probs of a checkpoint, by set. UsageError for a damaged file."""
    found = load_plain(path.read_bytes(), f"--load {path}")
    sets = found if isinstance(found, dict) else {}
    if not all(isinstance(sets.get(n), Tensor) and sets[n].shape[1:] == (2,) for n in (PROMPTS, EVAL_PROMPTS)):
        raise UsageError(f"--load {path}: holds no log-probs of a reference")
    return sets
