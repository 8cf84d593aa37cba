"""The role teacher: one frozen model, or several that take turns on its ranks, each with the sequences of its lines."""

import torch
from torch import Tensor

from megarl.arguments import RunConfig
from megarl.batch import FIELDS, Batch
from megarl.checkpoint.pretrained import PretrainedWeights
from megarl.comm.role_mesh import RoleGroups, RoleMesh
from megarl.comm.step_batch import StepBatch
from megarl.data.ragged import Ragged
from megarl.mcore import device
from megarl.observe.timers import Timers
from megarl.roles.frozen_model import FrozenModel
from megarl.roles.sibling_context import SiblingContext
from megarl.roles.teacher import Teacher
from megarl.roles.teacher_prompts import TeacherPrompts, prompts_of_lines, with_prompts
from megarl.roles.trainable_model import TrainableModel
from megarl.router_replay.router_state import RouterState


class Teachers:
    """The teachers of a run; only for runs with `--distill`. Of several, one at a time is on the device."""

    name = "teacher"

    def __init__(
        self, config: RunConfig, role_groups: RoleGroups, vocab_size: int, timers: Timers,
        prompts: Ragged | None = None, numbers: Tensor | None = None, context: SiblingContext | None = None,
    ):  # fmt: skip
        """Builds the models on this rank. A collective of the role.

        Args:
            vocab_size: of a model without a Hugging Face folder: the policy's tokenizer's.
            prompts: by line, the tokens of the prompt that the teachers read instead; none: the policy's.
            numbers: [lines] int64, which of `--teachers` each line has; None: there is one, or batches say it.
            context: makes prompts with a sibling's response; None: `--teacher-context prompt`.
        """
        self.settings, self.role_groups, self.timers = config.settings, role_groups, timers
        self.outputs = config.settings.teacher_fields
        self.metrics: dict[str, float] = {}
        self._prompts, self._numbers, self._context = prompts, numbers, context
        self._state_bytes = config.teachers.state_bytes
        self._model_of = torch.tensor(config.teachers.model_of, dtype=torch.int64)
        self.teachers = [
            Teacher(config.settings, role, role_groups, role.model_vocab_size(vocab_size), timers)
            for role in config.teachers.models
        ]

    @property
    def frozen_models(self) -> list[FrozenModel]:
        """The models on this rank."""
        return [teacher.frozen_model for teacher in self.teachers if teacher.frozen_model is not None]

    @property
    def router_states(self) -> list[RouterState]:
        """Those of the models on this rank."""
        return [model.router_state for model in self.frozen_models]

    def load(self, weights: list[PretrainedWeights | None]):
        """Loads the weights of each model; None: they are drawn from the seed. A collective of the role."""
        for model, of_model in zip(self.frozen_models, weights, strict=False):
            if of_model is not None:
                model.load_pretrained(of_model)

    def plan_refreshes(self, mesh: RoleMesh, actor: TrainableModel | None):
        """Plans how the moving average of the actor reaches a teacher that follows it. Collective.

        `actor`: its model on this rank; None outside the role.
        """
        for teacher in self.teachers:
            teacher.plan_refreshes(mesh, actor)

    def refresh(self):
        """Gives a teacher that follows the actor the weights that its model has now, the average. Collective."""
        for teacher in self.teachers:
            self.metrics |= teacher.refresh()

    def score(self, step_batch: StepBatch):
        """Fills `teacher_logprobs` or `teacher_states`, and with several teachers `teacher_ids`.

        With `--teacher-context sibling` a collective of reward and teacher, which gets the rewards.
        """
        if self.settings.context_fields:
            step_batch.pass_on("reward", self.name, self.settings.context_fields)
        batch = step_batch[self.name]
        if batch is None:
            return
        if self._numbers is not None:
            batch.teacher_ids = self._numbers.to(batch.prompt_ids.device)[batch.prompt_ids]
        with self.timers.phase(self.name, "logprobs"):
            prompts = self._prompts_of(batch, step_batch)
            if prompts is None:
                self.score_batch(batch)
            else:
                read, places = with_prompts(batch, prompts)
                self.score_batch(read)
                name = self.outputs[0]
                values = getattr(read, name)
                setattr(batch, name, values.new_zeros(len(batch.tokens), *values.shape[1:]))
                getattr(batch, name)[places.own] = values[places.read]
        offloaded = [model.offload.bytes for model in self.frozen_models if model.offload.blocks]
        if offloaded:
            self.metrics[f"memory/{self.name}/offloaded_bytes"] = sum(offloaded)

    def _prompts_of(self, batch: Batch, step_batch: StepBatch) -> TeacherPrompts | None:
        """What the teachers read before the responses; None: the policy's prompts. A collective of the role."""
        if self._prompts is None and self._context is None:
            return None
        own = TeacherPrompts([None] * len(batch), batch.prompt_ids.cpu())
        if self._prompts is not None:
            own = prompts_of_lines(batch, self._prompts)
        if self._context is None:
            return own
        found = self._context.prompts(batch, step_batch.groups, step_batch.prompts, own)
        self.metrics |= self._context.metrics(self.role_groups)
        return found

    def score_batch(self, batch: Batch):
        """`score` of a replica's batch, which has its `teacher_ids`. A collective of the role."""
        if len(self.teachers) == 1:
            self.teachers[0].score_batch(batch)
            return
        name, model_of = self.outputs[0], self._model_of[batch.teacher_ids.cpu()]
        field = self._empty_field(name, batch)
        own = torch.bincount(model_of, minlength=len(self.teachers)).to(batch.lengths.device)
        of_role = self.role_groups.dp_all_reduce(own).tolist()
        for number, teacher in enumerate(self.teachers):
            if not of_role[number]:
                continue  # on no replica: it stays in host memory
            index = (model_of == number).nonzero().flatten().to(batch.lengths.device)
            rows = batch.token_positions(index)
            read = batch.take(index, rows)
            teacher.score_batch(read)
            values = getattr(read, name)
            if values.dim() == 1:
                field[rows] = values
            else:
                field[rows, : values.shape[1]] = values
        setattr(batch, name, field)

    def _empty_field(self, name: str, batch: Batch) -> Tensor:
        """Zeros [T], or [T, B] where B bytes hold a hidden state of any of the teachers."""
        shape = [len(batch.tokens)]
        if name == "teacher_states":
            shape.append(self._state_bytes)
        return torch.zeros(shape, dtype=FIELDS[name].dtype, device=device.device())
