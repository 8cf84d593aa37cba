"""Supervised fine-tuning: the loss is the mean negative log-probability of the response tokens, or with a teacher the
divergence from its distributions of these tokens."""

from collections.abc import Callable

import torch
from torch import Tensor

from megarl.algorithms.aggregation import masked_sum, token_mean
from megarl.arguments import RunConfig
from megarl.batch import ACTOR, TEACHER, Batch, fields_sent
from megarl.comm import exchange
from megarl.data.columns import SFT
from megarl.data.conversations import Encoder
from megarl.data.examples import Examples, sft_examples
from megarl.data.prompts import PromptSet
from megarl.flags.distillation import LOSS
from megarl.mcore import device
from megarl.mcore.model import forward_pass
from megarl.observe.terminal import SFT_FIELDS
from megarl.roles.passes import policy_scores
from megarl.roles.teacher import (
    DISTILL_NAMES,
    TeacherOutput,
    Teachers,
    masks_by_teacher,
    measured_apart,
    names_by_teacher,
    token_counts,
)
from megarl.trainers.prompt_inputs import EVAL_PROMPTS, PROMPTS
from megarl.trainers.supervised_trainer import ExampleBatch, SupervisedTrainer


class SFTTrainer(SupervisedTrainer):
    """Trains a language model on responses. Its role is the actor, so that train_rl can start from it."""

    program, purpose, best_metric = "train_sft", SFT, "loss"
    sequence_names = ("first",)
    metric_names: tuple[str, ...] = ("loss",)
    fields = SFT_FIELDS

    @staticmethod
    def read(prompts: PromptSet, encoder: Encoder, config: RunConfig) -> Examples:
        """(tokens, mask of the tokens in the loss) of each line."""
        s = config.settings
        return sft_examples(prompts, encoder, s.max_prompt_length, s.max_response_length, s.filter_long_prompts)

    def prepare(self):
        """Builds the teachers, if there are any, and copies their output layers. Collective."""
        s, self._teacher_output = self.settings, None
        self._measured: tuple[str, ...] = ()  # names of teachers that are measured apart
        self._taught = torch.zeros(0)  # tokens of the present batch by such a teacher
        if s.distill == LOSS:
            self._teachers = Teachers(self.config, self.mesh["teacher"], self.vocab_size, self.timers)
            self._teachers.load(self.inputs.teachers)
            for frozen in self._teachers.frozen_models if self.images is not None else ():
                self.images.attach(frozen.role, frozen.model)
            policy, models = self.trainable_model.model, self.config.teachers
            self._teacher_output = TeacherOutput(s, self._teachers, self.mesh, policy, models)
            self._measured = measured_apart(s)
            compared = DISTILL_NAMES + names_by_teacher(DISTILL_NAMES, self._measured)
            self.metric_names = ("loss", "negative_logprob", *compared)

    def update(self, examples: ExampleBatch):
        """One optimizer update on the mean loss of a batch; sets `metrics`."""
        self._ask_teacher(examples, PROMPTS)
        own = token_counts(examples.batch, examples.batch.response_mask, self._measured)
        self._taught = self.role_groups.dp_all_reduce(own) if self._measured else own
        super().update(examples)

    def metric_counts(self, tokens: Tensor) -> Tensor:
        """[M] the tokens of the batch, for the metrics of one of several teachers its own."""
        of_teachers = self._taught.repeat_interleave(len(DISTILL_NAMES))
        return torch.cat([tokens.expand(len(self.metric_names) - len(of_teachers)), of_teachers])

    def _ask_teacher(self, examples: ExampleBatch, prompts: str):
        """Fills `teacher_states` of the batch on the ranks of the teachers. `prompts`: the set of the examples."""
        if self._teacher_output is None:
            return
        batch, numbers, read = examples.batch, self.inputs.teacher_numbers[prompts], ["tokens", "response_mask"]
        if numbers is not None:
            lines = torch.tensor(examples.lines, dtype=torch.int64)[batch.sequence_ids.cpu()]
            batch.teacher_ids, read = numbers[lines].to(batch.lengths.device), [*read, "teacher_ids"]
        teacher, states = self._teachers.name, fields_sent(self.settings, [TEACHER], ACTOR)
        sent = exchange.send(self.mesh, batch, ACTOR, teacher, read, examples.dp_assignment)
        self._teachers.score_batch(sent)
        batch.update(exchange.send(self.mesh, sent, teacher, ACTOR, states, examples.dp_assignment), states)

    def _forward(self, chunk, microbatch) -> forward_pass.TokenScores:
        teachers, only_distills = [], False
        if self._teacher_output is not None:
            teachers = self._teacher_output.rows(microbatch)
            only_distills = not self.settings.distill_sft_coefficient
        learner = self.trainable_model.learner(microbatch)
        return policy_scores(chunk, microbatch, 1.0, self.vocab_size, teachers, only_distills, learner)

    def loss_of(self, examples: ExampleBatch, tokens: Tensor) -> Callable:
        """The mean negative log-probability of the response tokens; with a teacher, the divergence from it."""
        s = self.settings

        def loss(scores, microbatch):
            def mean(values: Tensor) -> Tensor:
                return token_mean(values, microbatch.response_mask, tokens)

            value = negative_logprob = mean(-scores.logprobs)
            compared = scores.distillation
            if not compared:
                return value, (value.detach().double().view(1),)
            value = s.distill_coefficient * mean(compared.divergence)
            if s.distill_sft_coefficient:
                value = value + s.distill_sft_coefficient * negative_logprob
            measured = value, negative_logprob, *map(mean, compared), *self._by_teacher(compared, microbatch)
            return value, (torch.stack([each.detach().double() for each in measured]),)

        return loss

    def _by_teacher(self, compared: tuple[Tensor, ...], microbatch: Batch) -> list[Tensor]:
        masks = masks_by_teacher(microbatch, microbatch.response_mask, self._measured)
        pairs = zip(masks, self._taught, strict=True)
        return [token_mean(values, mask, count) for mask, count in pairs for values in compared]

    def evaluate_batch(self, examples: ExampleBatch) -> dict[str, float]:
        """Mean negative log-probability of the held-out responses' tokens, and their divergence from the teacher.
        Collective."""
        self._ask_teacher(examples, EVAL_PROMPTS)
        names = "eval/loss", "eval/divergence", *names_by_teacher(("eval/divergence",), self._measured)
        sums = torch.zeros(len(names), 2, dtype=torch.float64, device=device.device())
        for scores, part in self.outputs(examples.batch, examples.batch.only("response_mask", "teacher_ids")):
            mask, divergence = part.response_mask, torch.zeros_like(scores.logprobs)
            if scores.distillation:
                divergence = scores.distillation.divergence
            masks = mask, *masks_by_teacher(part, mask, self._measured)
            measured = (-scores.logprobs, mask), *((divergence, of_teacher) for of_teacher in masks)
            sums += torch.stack([torch.stack([masked_sum(x, m).double(), m.sum().double()]) for x, m in measured])
        totals = self.role_groups.dp_all_reduce(sums).tolist()
        found = list(zip(names, totals, strict=True))[: None if self._teacher_output is not None else 1]
        # Some of several teachers may have none of the held-out tokens.
        return {name: total / max(count, 1.0) for name, (total, count) in found if count or name in names[:2]}
