"""What supervised runs share: examples read and checked, start, resume, a step's batch, evaluation, checkpoints."""

import abc
from typing import NamedTuple

import torch
from torch import Tensor

from megarl.arguments import RunConfig, Settings
from megarl.batch import Batch, common_prefix_lengths
from megarl.checkpoint import folders, run_state
from megarl.comm import load_balance
from megarl.comm import microbatches as mb
from megarl.data.conversations import Encoder
from megarl.data.order import PromptOrder
from megarl.data.prompts import PromptSet, load_prompts
from megarl.errors import UsageError
from megarl.mcore import device
from megarl.mcore.model import gpt
from megarl.observe.timers import Timers
from megarl.roles.trainable_model import TrainableModel
from megarl.trainers.setup import build_role_encoder, check_required, check_training_flags, create_role_mesh
from megarl.trainers.trainer import Trainer


class TaskSpec(NamedTuple):
    """What a supervised program trains, and from what it starts."""

    program: str  # its module, as manifests name it
    role: str  # that trains: prefix of its flags and of its keys in checkpoints
    value_head: bool  # a scalar head in the place of the vocabulary's
    sequences_per_example: int  # sequences of an example
    sources: tuple[str, ...]  # roles whose weights it may start from


class ExampleBatch(NamedTuple):
    """Examples that were drawn together."""

    examples: list  # of all lanes
    batch: Batch  # this lane's sequences; those of the i-th example have the ids i·together, i·together + 1 …


class SupervisedTrainer(Trainer, abc.ABC):
    """A supervised run on this rank; what it learns, and how, its subclasses say."""

    task: TaskSpec
    fields: tuple  # what the line of a step shows

    def __init__(self, config: RunConfig, timers: Timers):
        inputs = SupervisedInputs(config, type(self))
        if config.check:
            raise SystemExit(0)
        super().__init__(config, create_role_mesh(config), timers, self.fields)
        self.inputs, self.role_groups = inputs, self.mesh[self.task.role]
        self.role, self.vocab_size = config.roles[self.task.role], inputs.vocab_size
        self.trainable_model = TrainableModel(
            self.role, self.role_groups, self.vocab_size, updates=1, value_head=self.task.value_head
        )
        self.order = PromptOrder(len(inputs.examples), self.settings.seed)
        self.metrics: dict[str, float] = {}
        if inputs.pretrained:
            self.trainable_model.load_pretrained(inputs.pretrained)
        if inputs.resume:
            self._resume()
        self.open(resumed=bool(inputs.resume))

    @staticmethod
    @abc.abstractmethod
    def read(prompts: PromptSet, encoder: Encoder, config: RunConfig) -> list:
        """The examples of a file; UsageError with file and line where there is none."""

    @staticmethod
    def check(settings: Settings):
        """UsageError where flags do not go together."""
        if settings.target_eval_loss and not settings.eval_interval:
            raise UsageError(f"--target-eval-loss {settings.target_eval_loss}: needs --eval-interval")

    @abc.abstractmethod
    def texts(self, example) -> list[tuple[list[int], list[bool]]]:
        """Tokens of an example's sequences, with the mask of those that count."""

    @abc.abstractmethod
    def update(self, examples: ExampleBatch):
        """One update."""

    @abc.abstractmethod
    def evaluate_batch(self, examples: ExampleBatch) -> dict[str, float]:
        """Metrics of held-out examples, `eval/loss` among them. Collective."""

    def is_reached(self) -> bool:
        """Whether an evaluation is as good as the run was to become."""
        target = self.settings.target_eval_loss
        return target is not None and self.metrics["eval/loss"] <= target

    def next_batch(self) -> ExampleBatch:
        """The next `--global-batch-size` examples."""
        lines = self.order.take(self.role.megatron.global_batch_size)
        return self._batch_of([self.inputs.examples[line] for line in lines])

    def _batch_of(self, examples: list) -> ExampleBatch:
        texts, sequences_per_example = (
            [text for example in examples for text in self.texts(example)],
            self.task.sequences_per_example,
        )
        lengths = torch.tensor([len(tokens) for tokens, _ in texts], dtype=torch.int64)
        whole, everything = lengths.view(-1, sequences_per_example).sum(1), [torch.arange(len(examples))]
        # What an example costs is reckoned as if its sequences were one.
        dp_assignment = load_balance.balance_by_flops(
            whole, everything, len(self.role_groups.replicas), self.role.megatron.hidden_size
        )
        ids = (
            torch.arange(len(texts))
            .view(-1, sequences_per_example)[dp_assignment == self.role_groups.dp_rank]
            .flatten()
        )
        mine, prompts = [texts[i] for i in ids.tolist()], {}
        if sequences_per_example > 1:
            alike = common_prefix_lengths([tokens for tokens, _ in mine], ids // sequences_per_example)
            prompts = {"prompt_ids": ids // sequences_per_example, "prompt_lengths": alike}
        batch = Batch(
            sequence_ids=ids,
            lengths=lengths[ids],
            tokens=torch.tensor([t for tokens, _ in mine for t in tokens], dtype=torch.int64),
            response_mask=torch.tensor([m for _, mask in mine for m in mask], dtype=torch.bool),
            **prompts,
        )
        return ExampleBatch(examples, batch.to(device.device()))

    def microbatches(self, batch: Batch) -> list[tuple[Batch, Tensor]]:
        """This lane's micro-batches, as many as on every other lane; the sequences of an example share one."""
        parts = mb.role_microbatches(
            batch, torch.arange(len(batch)), self.role, self.role_groups, self.task.sequences_per_example
        )
        self.trainable_model.routes.attach(batch, parts)
        return parts

    def evaluate(self, step: int):
        """Evaluates on held-out examples every `--eval-interval` steps; ends the run at its target. Collective."""
        s = self.settings
        if s.eval_prompts and self.is_due(s.eval_interval):
            self.metrics |= self.evaluate_batch(self._batch_of(self.inputs.held_out[: s.eval_samples]))
            if self.is_reached():
                self.last_step = step

    def log(self, step: int):
        """Publishes the step's metrics; rank 0 writes them once all ranks have ended the step."""
        self.publish(self.metrics)

    def save(self, step: int):
        """Saves a checkpoint every `--save-interval` steps and after the last. Collective."""
        if self.folder and self.is_due(self.settings.save_interval):
            manifest = self.manifest_entries(self.task.program, self.vocab_size, self.order)
            states = {self.task.role: self.trainable_model.state({})}
            run_state.save(self.folder, step, self.mesh, states, manifest)

    def _resume(self):
        states = {self.task.role: self.trainable_model.state({}, loading=True)}
        loaded = run_state.load(self.inputs.resume, self.mesh, states)
        self.resume_from(self.inputs.resume, self.order)
        self.trainable_model.restore(loaded[self.task.role])


class SupervisedInputs:
    """Examples and checkpoints of a supervised run, read and checked before any rank joins another."""

    def __init__(self, config: RunConfig, run: type[SupervisedTrainer]):
        s, task = config.settings, run.task
        role = config.roles[task.role]
        check_training_flags(config)
        check_required({"--global-batch-size": role.megatron.global_batch_size})
        run.check(s)
        encoder = build_role_encoder(role, s)
        self.vocab_size = encoder.tokenizer.vocab_size
        self.examples, self.held_out = run.read(load_prompts(s.prompts, "--prompts"), encoder, config), []
        if s.eval_prompts:
            self.held_out = run.read(load_prompts(s.eval_prompts, "--eval-prompts"), encoder, config)
        described = (task.role, role.megatron, self.vocab_size)
        self.pretrained = self.resume = None
        if start := role.megatron.pretrained_checkpoint:
            self.pretrained = run_state.find_weights(start, "--pretrained-checkpoint", *described, task.sources)
        if s.load:
            shapes = {task.role: gpt.weight_shapes(*described, resumes=True, value_head=task.value_head)}
            self.resume = folders.check_resume(s.load, task.program, s.train_iters, shapes)
