"""Training of a policy on preference pairs: its reference's log-probs, the loss, accuracy on held-out pairs."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from megarl.algorithms.aggregation import masked_sum
from megarl.algorithms.packed import response_counts, sums_by_sequence
from megarl.algorithms.preference_losses import PAIR_METRICS, PREFERENCE_LOSSES, PairLogprobs, pair_metrics
from megarl.arguments import RunConfig
from megarl.batch import Batch
from megarl.checkpoint import resume
from megarl.data.columns import REWARD
from megarl.data.conversations import Encoder
from megarl.data.examples import Examples
from megarl.data.preferences import response_pairs
from megarl.data.prompts import PromptSet
from megarl.errors import UsageError, flag_of
from megarl.flags.preferences import preference_options
from megarl.mcore import device
from megarl.mcore.model import forward_pass
from megarl.mcore.weights.safe_reading import load_plain
from megarl.observe.progress import PREFERENCE_FIELDS
from megarl.roles.passes import policy_scores
from megarl.trainers.prompt_inputs import EVAL_PROMPTS, PROMPTS
from megarl.trainers.supervised_trainer import ExampleBatch, PairwiseTrainer, SupervisedInputs, SupervisedTrainer

REFERENCE_FILE = "reference_logprobs.pt"  # in a checkpoint


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
        limits = s.max_prompt_length, s.max_response_length, s.filter_long_prompts
        examples = cls.examples_of(prompts, encoder, *limits)
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
            for scores, positions in self.trainable_model.forward_only(self.microbatches(batch.batch), self._forward):
                if len(positions):
                    part = batch.batch.select(positions)
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
            chosen=chosen, rejected=rejected, chosen_tokens=chosen_tokens, rejected_tokens=rejected_tokens,
            reference_chosen=reference_chosen, reference_rejected=reference_rejected, margin=margin,
        )  # fmt: skip
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
