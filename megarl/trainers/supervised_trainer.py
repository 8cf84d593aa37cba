"""The base class of trainers on examples: inputs, batches, evaluation, checkpoints and resume."""

import abc
import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from megarl.arguments import RunConfig
from megarl.batch import Batch, common_prefix_lengths
from megarl.checkpoint import host_memory, resume
from megarl.checkpoint.pretrained import find_pretrained
from megarl.comm import load_balance
from megarl.data.conversations import Encoder
from megarl.data.examples import Examples
from megarl.data.prompts import PromptSet
from megarl.mcore import device
from megarl.observe.timers import Timers
from megarl.roles.trainable_model import TrainableModel
from megarl.trainers import setup
from megarl.trainers.events import export
from megarl.trainers.image_inputs import RunImages
from megarl.trainers.prompt_inputs import EVAL_PROMPTS, PROMPTS, read_prompts
from megarl.trainers.teacher_inputs import find_teachers, teachers_of_lines
from megarl.trainers.trainer import Trainer


class ExampleBatch(NamedTuple):
    """The examples of a step or an evaluation."""

    count: int  # type: ignore[assignment]  # of all replicas; hides tuple.count
    lines: Sequence[int]  # [count] of the set
    source: Any  # the set, `Examples`
    batch: Batch  # this replica's sequences; example i of k sequences has the ids i·k … i·k + k − 1
    dp_assignment: dict[str, Tensor]  # role -> [count] int64: the dp rank of each example


class SupervisedTrainer(Trainer, abc.ABC):
    """A supervised run on this rank. Subclasses define the examples, the loss and the evaluation."""

    program: ClassVar[str]  # name of its module, in manifests
    trained_role = "actor"  # prefix of its flags and checkpoint keys
    sources: tuple[str, ...] = ("actor",)  # roles whose weights it may start from
    purpose: ClassVar[str]  # what its prompts are read for (`data.columns`)
    sequence_names: tuple[str, ...]  # of an example: one, or two for a preference pair
    sequences_together = 1  # of an example, in one micro-batch
    best_metric = "accuracy"  # of an evaluation: it tells which checkpoint is the best
    metric_names: tuple[str, ...]  # of an update, the loss first; without a slash they get the program's prefix

    def __init__(self, config: RunConfig, timers: Timers):
        inputs, mesh, used = setup.read_inputs(
            config, timers, lambda: SupervisedInputs(config, type(self)), folder=config.settings.save
        )
        super().__init__(config, mesh, inputs, timers, self.best_metric)
        self.role_groups = mesh[self.trained_role]
        self.role, self.vocab_size = config.roles[self.trained_role], inputs.vocab_size
        self.trainable_model = TrainableModel(
            self.role, self.role_groups, self.vocab_size, updates=1, value_head=self.role.has_scalar_head
        )
        if self.settings.ema_decay is not None:
            self.trainable_model.keep_average(self.settings.ema_decay)
        self.order = inputs.prompt_sets[PROMPTS].order(self.settings.seed)
        self.metrics: dict[str, float] = {}
        if self.images is not None:
            self.images.attach(self.role, self.trainable_model.model)
        if inputs.pretrained:
            self.trainable_model.load_pretrained(inputs.pretrained)
        if inputs.resume:
            self._resume()
        self.open(inputs.resume, used)
        self.prepare()

    @staticmethod
    @abc.abstractmethod
    def read(prompts: PromptSet, encoder: Encoder, config: RunConfig) -> Examples:
        """The example of each line of a file; UsageError with file and line for an invalid one."""

    @staticmethod
    def check_resumed(config: RunConfig, inputs: "SupervisedInputs"):
        """UsageError for a checkpoint, `inputs.resume`, that this run cannot go on from."""

    @abc.abstractmethod
    def loss_of(self, examples: ExampleBatch, tokens: Tensor) -> Callable:
        """The loss of an update, as of `TrainableModel.checked_update`, with metrics named `metric_names`.

        `tokens`: those of the batch's response masks, of all replicas.
        """

    def metric_counts(self, tokens: Tensor) -> Tensor:
        """What the metrics of an update are means over, as of `Update`."""
        return tokens

    @abc.abstractmethod
    def _forward(self, chunk, microbatch: Batch):
        """The model's output on a micro-batch."""

    @abc.abstractmethod
    def evaluate_batch(self, examples: ExampleBatch) -> dict[str, float]:
        """Metrics of held-out examples, `eval/loss` among them. Collective."""

    def prepare(self):
        """What is computed before the first step of this process. Collective."""

    def files(self) -> dict[str, bytes]:
        """Further files of this rank for a checkpoint, by name."""
        return {}

    def train(self):
        """The whole run. Each step: one mini-batch, its loss, one update."""
        for step in self.steps():
            batch = self.next_batch()
            self.update(batch)
            self.evaluate(step)
            self.log(step)
            self.save(step)
        self.close()

    def trained_models(self) -> list[TrainableModel]:
        return [self.trainable_model]

    def update(self, examples: ExampleBatch):
        """One optimizer update on the mean loss of a batch; sets `metrics`."""
        with self.timers.phase(self.trained_role, "update"):
            self.trainable_model.router_state.begin_step()
            counts = torch.stack([examples.batch.response_mask.sum(), examples.batch.lengths.sum()]).double()
            tokens, total = self.role_groups.dp_all_reduce(counts)
            _, update = self.trainable_model.checked_update(
                self.microbatches(examples.batch),
                self._forward,
                self.loss_of(examples, tokens),
                self.metric_names,
                counts=self.metric_counts(tokens),
                check=lambda loss, _: math.isfinite(loss),
            )
            prefix = self.program.removeprefix("train_")
            names = tuple(name if "/" in name else f"{prefix}/{name}" for name in self.metric_names)
            self.metrics = {
                **self.trainable_model.update_metrics([update], names, prefix),
                "perf/tokens": int(total),
                **self.trainable_model.router_state.metrics("router"),
                **({} if self.images is None else self.images.take_metrics(self.role_groups)),
            }
        if self.settings.ema_decay is not None:
            with self.timers.phase(self.trained_role, "average"):
                self.metrics |= self.trainable_model.update_average()

    def next_batch(self) -> ExampleBatch:
        """The next `--global-batch-size` examples."""
        return self._batch_of(self.inputs.examples, self.order.take(self.role.megatron.global_batch_size))

    def _batch_of(self, examples: Examples, lines: Sequence[int]) -> ExampleBatch:
        """This replica's part of the examples of these lines; of the others only the lengths are read."""
        per_example = len(self.sequence_names)
        lengths = torch.from_numpy(examples.lengths(lines))
        # The cost of an example is estimated as if its sequences were one.
        every, hidden = [torch.arange(len(lines))], self.role.megatron.hidden_size
        dp_assignment = {
            role: load_balance.balance_by_flops(lengths.sum(1), every, len(role_groups.replicas), hidden)
            for role, role_groups in self.mesh.roles.items()
        }
        numbers = (dp_assignment[self.trained_role] == self.role_groups.dp_rank).nonzero().flatten()
        sequences = [sequence for number in numbers.tolist() for sequence in examples[lines[number]]]
        prompts = {}
        if per_example > 1:
            ids = numbers.repeat_interleave(per_example)
            before = [tokens[: mask.index(True)] for tokens, mask in sequences]
            prompts = {"prompt_ids": ids, "prompt_lengths": common_prefix_lengths(before, ids)}
        batch = Batch(
            sequence_ids=(numbers[:, None] * per_example + torch.arange(per_example)).flatten(),
            lengths=lengths[numbers].flatten(),
            tokens=torch.tensor([t for tokens, _ in sequences for t in tokens], dtype=torch.int64),
            response_mask=torch.tensor([m for _, mask in sequences for m in mask], dtype=torch.bool),
            **prompts,
        )
        return ExampleBatch(len(lines), lines, examples, batch.to(device.device()), dp_assignment)

    def outputs(self, batch: Batch, read: Batch | None = None) -> Iterator[tuple[Any, Batch]]:
        """(the model's output without gradients, the sequences that it is of), one micro-batch after the other.

        `read`: the batch with the fields alone that the caller reads.
        """
        for output, positions in self.trainable_model.forward_only(self.microbatches(batch), self._forward):
            if len(positions):
                yield output, (read or batch).select(positions)

    def microbatches(self, batch: Batch) -> list[tuple[Batch, Tensor]]:
        """This replica's micro-batches, equally many on every replica."""
        every = torch.arange(len(batch))
        return self.trainable_model.microbatches(batch, every, self.sequences_together)

    def evaluate(self, step: int):
        """Evaluates on held-out examples every `--eval-interval` steps; the run ends at its target. Collective."""
        s, self._is_best = self.settings, False
        if self.events.evaluates and self.is_due(s.eval_interval):
            lines = range(len(self.inputs.held_out))[: s.eval_samples]
            with self.trainable_model.averaged() if s.evaluate_ema else contextlib.nullcontext():
                self.metrics |= self.evaluate_batch(self._batch_of(self.inputs.held_out, lines))
            self._is_best = self.events.keeps_best and self.best.update(self.metrics, step)
            loss, accuracy = s.target_eval_loss, s.target_eval_accuracy
            has_low_loss = loss is not None and self.metrics["eval/loss"] <= loss
            if has_low_loss or accuracy is not None and self.metrics["eval/accuracy"] >= accuracy:
                self.last_step = step

    def log(self, step: int):
        """Publishes the step's metrics; rank 0 writes them once all ranks have ended the step."""
        self.publish(self.metrics)

    def save(self, step: int):
        """Saves a checkpoint every `--save-interval` steps, and after the best evaluation so far. Collective."""
        is_due = self.is_due(self.settings.save_interval)
        if not (writers := self.writers(is_due)):
            return
        manifest = self.manifest_entries(self.program, self.vocab_size, is_due)
        manifest["prompt_order"] = self.order.state_dict()
        states, files = {self.trained_role: self.trainable_model.state({})}, self.files()
        for writer in writers:
            writer.save(step, states, manifest, files)
        if self.checkpoints in writers:
            export(self.trainable_model, self.inputs.encoder, self.folder, self.events.exports, step)

    def _resume(self):
        has_average = resume.holds_average(self.inputs.manifest)
        state = self.trainable_model.state({}, loading=True, has_average=has_average)
        loaded = resume.load_states(self.inputs.resume, self.mesh, {self.trained_role: state})
        self.restore_progress(self.order)
        self.trainable_model.restore(loaded[self.trained_role])


class SupervisedInputs:
    """Examples and checkpoints of a supervised run, read and checked before the process group exists."""

    def __init__(self, config: RunConfig, trainer: type[SupervisedTrainer]):
        s, role = config.settings, config.roles[trainer.trained_role]
        setup.check_training_flags(config, trainer.sequences_together)
        self.encoder = encoder = setup.build_role_encoder(role, s)
        encoder.check_turns()
        setup.check_vocabulary(role, encoder.tokenizer.vocab_size)
        self.vocab_size = role.model_vocab_size(encoder.tokenizer.vocab_size)
        self.teachers = find_teachers(config, encoder)
        prompt_sets = read_prompts(s, trainer.purpose, encoder)
        self.images = RunImages.of(config, encoder)
        examples = {name: trainer.read(prompts, encoder, config) for name, prompts in prompt_sets.items()}
        lines = {name: teachers_of_lines(found.prompts, config, encoder) for name, found in examples.items()}
        self.prompt_sets = {name: prompts for name, (prompts, _) in lines.items()}
        self.teacher_numbers = {name: numbers for name, (_, numbers) in lines.items()}
        self.first_example = dict(zip(trainer.sequence_names, examples[PROMPTS][0], strict=True))
        self.examples, self.held_out = examples[PROMPTS], examples.get(EVAL_PROMPTS, [])
        self.pretrained = self.resume = None
        self.manifest: dict = {}  # of the checkpoint to resume from
        if not s.load or role.lora:  # a checkpoint of low-rank factors does not hold the weights under them
            self.pretrained = find_pretrained(role, self.vocab_size, trainer.sources, role.has_scalar_head)
        self.data = resume.data_fingerprints(encoder, s, self.prompt_sets) if s.load or s.save else {}
        if s.load:
            tokens = encoder.tokenizer.vocab_size
            self.resume, self.manifest = resume.check_resume(trainer.program, config, self.data, [role], tokens)
            trainer.check_resumed(config, self)
            if self.images is not None:
                self.images.check_resumed(self.manifest, s.load)
        host_memory.check_room(config, encoder.tokenizer.vocab_size)
