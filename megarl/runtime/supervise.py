"""What supervised runs share: examples read and checked, start, resume, a step's batch, evaluation, checkpoints."""

import abc
from typing import NamedTuple

import torch
from torch import Tensor

from megarl.arguments import Program, Settings
from megarl.batch import Batch, common_beginnings
from megarl.checkpoint import folders, state
from megarl.data.conversations import Encoder
from megarl.data.order import PromptOrder
from megarl.data.prompts import PromptSet, load_prompts
from megarl.errors import UsageError
from megarl.mcore import device, model
from megarl.observe.timers import Timers
from megarl.roles import lanes
from megarl.roles import microbatches as mb
from megarl.roles.learner import Learner
from megarl.runtime.run import Run, check_common, check_given, create_world, encoder_of


class Kind(NamedTuple):
    """What a supervised program trains, and from what it starts."""

    program: str  # its module, as manifests name it
    role: str  # that trains: prefix of its flags and of its keys in checkpoints
    value_head: bool  # a scalar head in the place of the vocabulary's
    together: int  # sequences of an example
    sources: tuple[str, ...]  # roles whose weights it may start from


class Drawn(NamedTuple):
    """Examples that were drawn together."""

    examples: list  # of all lanes
    batch: Batch  # this lane's sequences; those of the i-th example have the ids i·together, i·together + 1 …


class Supervision(Run, abc.ABC):
    """A supervised run on this rank; what it learns, and how, its subclasses say."""

    kind: Kind
    fields: tuple  # what the line of a step shows

    def __init__(self, program: Program, timers: Timers):
        inputs = Inputs(program, type(self))
        if program.check:
            raise SystemExit(0)
        super().__init__(program, create_world(program), timers, self.fields)
        self.inputs, self.place = inputs, self.world[self.kind.role]
        self.role, self.vocab_size = program.roles[self.kind.role], inputs.vocab_size
        self.learner = Learner(self.role, self.place, self.vocab_size, updates=1, value_head=self.kind.value_head)
        self.order = PromptOrder(len(inputs.examples), self.settings.seed)
        self.metrics: dict[str, float] = {}
        if inputs.pretrained:
            self.learner.start_from(inputs.pretrained)
        if inputs.resume:
            self._resume()
        self.open(resumed=bool(inputs.resume))

    @staticmethod
    @abc.abstractmethod
    def read(prompts: PromptSet, encoder: Encoder, program: Program) -> list:
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
    def learn(self, drawn: Drawn, step: int):
        """One update."""

    @abc.abstractmethod
    def evaluate(self, drawn: Drawn) -> dict[str, float]:
        """Metrics of held-out examples, `eval/loss` among them. Collective."""

    def is_reached(self) -> bool:
        """Whether an evaluation is as good as the run was to become."""
        target = self.settings.target_eval_loss
        return target is not None and self.metrics["eval/loss"] <= target

    def next_examples(self) -> Drawn:
        """The next `--global-batch-size` examples."""
        lines = self.order.take(self.role.megatron.global_batch_size)
        return self._draw([self.inputs.examples[line] for line in lines])

    def _draw(self, examples: list) -> Drawn:
        texts, together = [text for example in examples for text in self.texts(example)], self.kind.together
        lengths = torch.tensor([len(tokens) for tokens, _ in texts], dtype=torch.int64)
        whole, everything = lengths.view(-1, together).sum(1), [torch.arange(len(examples))]
        # What an example costs is reckoned as if its sequences were one.
        owners = lanes.by_work(whole, everything, len(self.place.lanes), self.role.megatron.hidden_size)
        ids = torch.arange(len(texts)).view(-1, together)[owners == self.place.lane].flatten()
        mine, prompts = [texts[i] for i in ids.tolist()], {}
        if together > 1:
            alike = common_beginnings([tokens for tokens, _ in mine], ids // together)
            prompts = {"prompt_ids": ids // together, "prompt_lengths": alike}
        batch = Batch(
            sequence_ids=ids,
            lengths=lengths[ids],
            tokens=torch.tensor([t for tokens, _ in mine for t in tokens], dtype=torch.int64),
            response_mask=torch.tensor([m for _, mask in mine for m in mask], dtype=torch.bool),
            **prompts,
        )
        return Drawn(examples, batch.to(device.device()))

    def parts(self, batch: Batch) -> list[tuple[Batch, Tensor]]:
        """This lane's micro-batches, as many as on every other lane; the sequences of an example share one."""
        parts = mb.of_role(batch, torch.arange(len(batch)), self.role, self.place, self.kind.together)
        self.learner.routes.attach(batch, parts)
        return parts

    def finish(self):
        """Ends a step: evaluation, metrics, checkpoint. Collective."""
        s = self.settings
        if s.eval_prompts and self.is_due(s.eval_interval):
            self.metrics |= self.evaluate(self._draw(self.inputs.held_out[: s.eval_samples]))
            if self.is_reached():
                self.last_step = self.step
        self.record(self.metrics)
        if self.folder and self.is_due(s.save_interval):
            self._save()

    def _save(self):
        facts = self.facts(self.kind.program, self.vocab_size, self.order)
        state.save(self.folder, self.step, self.world, {self.kind.role: self.learner.state({})}, facts)

    def _resume(self):
        states = {self.kind.role: self.learner.state({}, loading=True)}
        loaded = state.load(self.inputs.resume, self.world, states)
        self.take_up(self.inputs.resume, self.order)
        self.learner.restore(loaded[self.kind.role])


class Inputs:
    """Examples and checkpoints of a supervised run, read and checked before any rank joins another."""

    def __init__(self, program: Program, run: type[Supervision]):
        s, kind = program.settings, run.kind
        role = program.roles[kind.role]
        check_common(program)
        check_given({"--global-batch-size": role.megatron.global_batch_size})
        run.check(s)
        encoder = encoder_of(role, s)
        self.vocab_size = encoder.tokenizer.vocab_size
        self.examples, self.held_out = run.read(load_prompts(s.prompts, "--prompts"), encoder, program), []
        if s.eval_prompts:
            self.held_out = run.read(load_prompts(s.eval_prompts, "--eval-prompts"), encoder, program)
        described = (kind.role, role.megatron, self.vocab_size)
        self.pretrained = self.resume = None
        if start := role.megatron.pretrained_checkpoint:
            self.pretrained = state.find_weights(start, "--pretrained-checkpoint", *described, kind.sources)
        if s.load:
            shapes = {kind.role: model.weight_shapes(*described, resumes=True, value_head=kind.value_head)}
            self.resume = folders.check_resume(s.load, kind.program, s.train_iters, shapes)
