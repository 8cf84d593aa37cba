"""The role teacher: a frozen model whose distributions the policy learns. Several take turns on the role's ranks, each
with the sequences of its lines.

With `--distill reward` a teacher sends its log-prob of each response token. With `--distill loss` it sends hidden
states, and the policy's last stage forms both models' logits itself (`TeacherOutput`): T · H_T numbers instead of
T · V, and no token of the vocabulary is left out.
"""

import functools

import numpy as np
import torch
from torch import Tensor

from megarl.algorithms.kl import Divergence
from megarl.arguments import RunConfig, Settings
from megarl.batch import FIELDS, REWARD, Batch
from megarl.checkpoint.pretrained import PretrainedWeights
from megarl.comm import microbatches as mb
from megarl.comm.role_mesh import RoleGroups, RoleMesh
from megarl.comm.step_batch import ACTOR, StepBatch
from megarl.data.ragged import Ragged
from megarl.flags.distillation import AVERAGE, LOSS, TeacherModels
from megarl.mcore import device
from megarl.mcore.kernels.head_divergence import TeacherHead
from megarl.mcore.model import forward_pass
from megarl.mcore.model.forward_pass import TeacherRows
from megarl.mcore.model.gpt import ModelChunks
from megarl.mcore.weights.reshard import HeadCopy
from megarl.observe.timers import Timers
from megarl.roles.frozen_model import FrozenModel, WeightRefresh
from megarl.roles.passes import policy_scores, token_states
from megarl.roles.teacher_prompts import SiblingContext, TeacherPrompts, prompts_of_lines, with_prompts
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
        self._output = "teacher_states" if config.settings.distill == LOSS else "teacher_logprobs"
        self.metrics: dict[str, float] = {}
        self._prompts, self._numbers, self._context = prompts, numbers, context
        self._state_bytes = config.teachers.state_bytes
        self._model_of = torch.tensor(config.teachers.model_of, dtype=torch.int64)
        models = config.teachers.models
        self._vocab_sizes = [role.model_vocab_size(vocab_size) for role in models]
        self.frozen_models: list[FrozenModel] = []  # on this rank
        if role_groups.is_member:
            sizes = zip(models, self._vocab_sizes, strict=True)
            self.frozen_models = [FrozenModel(role, role_groups, size, timers) for role, size in sizes]
        self._refresh: WeightRefresh | None = None

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
        if self.settings.teacher == AVERAGE and (actor is not None or self.frozen_models):
            (frozen,) = self.frozen_models or [None]
            self._refresh = WeightRefresh(mesh, self.name, actor, frozen, 1.0, self.timers)

    def refresh(self):
        """Gives a teacher that follows the actor the weights that its model has now, the average. Collective."""
        if self._refresh is not None:
            self.metrics["weights/teacher_bytes"] = self._refresh.run()

    def score(self, step_batch: StepBatch):
        """Fills `teacher_logprobs` or `teacher_states`, and with several teachers `teacher_ids`.

        With `--teacher-context sibling` a collective of reward and teacher, which gets the rewards.
        """
        step_batch.pass_on(REWARD, self.name)  # with `--teacher-context sibling`
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
                read, own_places, read_places = with_prompts(batch, prompts)
                self.score_batch(read)
                name = self._output
                values = getattr(read, name)
                setattr(batch, name, values.new_zeros(len(batch.tokens), *values.shape[1:]))
                getattr(batch, name)[own_places] = values[read_places]
        offloaded = [model.offload.bytes for model in self.frozen_models if model.offload.blocks]
        if offloaded:
            self.metrics[f"memory/{self.name}/offloaded_bytes"] = sum(offloaded)

    def _prompts_of(self, batch: Batch, step_batch: StepBatch) -> TeacherPrompts | None:
        """What the teachers read before the responses; None: the policy's prompts. A collective of the role."""
        if self._prompts is None and self._context is None:
            return None
        own: TeacherPrompts = [None] * len(batch), batch.prompt_ids.cpu()
        if self._prompts is not None:
            own = prompts_of_lines(batch, self._prompts)
        if self._context is None:
            return own
        found = self._context.prompts(batch, step_batch.groups, step_batch.prompts, own)
        self.metrics |= self._context.metrics(self.role_groups)
        return found

    def score_batch(self, batch: Batch):
        """`score` of a replica's batch, which has its `teacher_ids`. A collective of the role."""
        if len(self.frozen_models) == 1:
            self._score_by(0, batch)
            return
        name, model_of = self._output, self._model_of[batch.teacher_ids.cpu()]
        # B bytes hold a hidden state of any of the teachers.
        shape = (len(batch.tokens), self._state_bytes) if name == "teacher_states" else (len(batch.tokens),)
        field = torch.zeros(shape, dtype=FIELDS[name]["dtype"], device=device.device())
        own = torch.bincount(model_of, minlength=len(self.frozen_models)).to(batch.lengths.device)
        of_role = self.role_groups.dp_all_reduce(own).tolist()
        for number, count in enumerate(of_role):
            if not count:
                continue  # on no replica: it stays in host memory
            index = (model_of == number).nonzero().flatten().to(batch.lengths.device)
            rows = batch.token_positions(index)
            read = batch.take(index, rows)
            self._score_by(number, read)
            values = getattr(read, name)
            if values.dim() == 1:
                field[rows] = values
            else:
                field[rows, : values.shape[1]] = values
        setattr(batch, name, field)

    def _score_by(self, number: int, batch: Batch):
        """Fills the teachers' field of a batch, by one of the models. A collective of the role."""
        model = self.frozen_models[number]
        if self.settings.distill == REWARD:
            results = model.forward_only(batch, functools.partial(self._logprobs, self._vocab_sizes[number]))
            mb.write_back(batch, "teacher_logprobs", [(scores.logprobs, at) for scores, at in results])
        else:
            mb.write_back_rows(batch, "teacher_states", model.forward_only(batch, token_states))

    def _logprobs(self, vocab_size: int, chunk, microbatch: Batch) -> forward_pass.TokenScores:
        return policy_scores(chunk, microbatch, self.settings.teacher_temperature, vocab_size)


# -- the teachers as the policy's ranks see them -------------------------------------------------------------------

# The teachers as the policy's ranks see them: their output layers, for a divergence over the whole vocabulary, and the
# metrics of distillation, with several teachers those of each teacher's tokens.


DISTILL_NAMES: tuple[str, ...] = ("distill/divergence", "distill/forward_kl", "distill/reverse_kl")
DISTILL_NAMES += ("distill/top1_agreement", "teacher/logprob")


def measured_apart(settings: Settings) -> tuple[str, ...]:
    """The teachers that have metrics of their own: those of `--teachers`, if they are several."""
    names = settings.teacher_names
    return names if len(names) > 1 else ()


def names_by_teacher(names: tuple[str, ...], teachers: tuple[str, ...]) -> tuple[str, ...]:
    """`distill/divergence/math` and so on: all names of the first teacher, then of the next."""
    return tuple(f"{name}/{teacher}" for teacher in teachers for name in names)


def masks_by_teacher(batch: Batch, mask: Tensor, teachers: tuple[str, ...]) -> list[Tensor]:
    """[T] bool for each teacher: the tokens of `mask` [T] whose teacher it is."""
    if not teachers:
        return []
    of_tokens = batch.teacher_ids.repeat_interleave(batch.lengths, output_size=len(mask))
    return [mask & (of_tokens == number) for number in range(len(teachers))]


def token_counts(batch: Batch, mask: Tensor, teachers: tuple[str, ...]) -> Tensor:
    """[K] float64: the tokens of `mask` of each of K teachers."""
    counts = [of_teacher.sum() for of_teacher in masks_by_teacher(batch, mask, teachers)]
    return torch.stack(counts).double() if counts else torch.zeros(0, dtype=torch.float64, device=mask.device)


class TeacherOutput:
    """The output layer of each teacher's model, in the policy's tensor-parallel layout."""

    def __init__(
        self, settings: Settings, teachers: Teachers, mesh: RoleMesh, policy: ModelChunks | None, models: TeacherModels
    ):
        """Copies the output layers from the teachers' ranks. A collective of the ranks of teacher and actor.

        Args:
            policy: the actor's model on this rank.
            models: the teachers' settings, on every rank.
        """
        divergence = Divergence(settings.distill_divergence, settings.distill_beta)
        self._dtypes = [role.megatron.params_dtype for role in models.models]
        self._model_of = np.array(models.model_of, np.int64)
        groups, channel = mesh[ACTOR].pg_collection, mesh.channel(teachers.name)
        held = teachers.frozen_models or [None] * len(models.models)
        self._copies = [
            HeadCopy(frozen, policy, groups, channel, dtype) for frozen, dtype in zip(held, self._dtypes, strict=True)
        ]
        self._heads = [
            TeacherHead(copy.weight, settings.teacher_temperature, role.megatron.final_logit_softcapping, divergence)
            for copy, role in zip(self._copies, models.models, strict=True)
            if copy.weight is not None
        ]

    def refresh(self):
        """Copies the present output layers again. A collective of the ranks of teacher and actor."""
        for copy in self._copies:
            copy.run()

    def rows(self, microbatch: Batch) -> list[TeacherRows]:
        """What `token_scores` compares a micro-batch with; none except on the ranks of the policy's last stage."""
        host, masks = microbatch.host_metadata, [None] * len(self._heads)
        if len(self._heads) > 1:
            of_tokens = np.repeat(self._model_of[host.teacher_ids.numpy()], host.lengths.numpy())
            masks = [of_tokens == number for number in range(len(self._heads))]
        pairs = enumerate(zip(self._heads, masks, strict=True))
        return [TeacherRows(self._states(microbatch.teacher_states, i), head, mask) for i, (head, mask) in pairs]

    def _states(self, states: Tensor, number: int) -> Tensor:
        """[T, H_T] the hidden states in a teacher's own width and dtype, from bytes [T, B] of the widest teacher."""
        width, dtype = self._heads[number].weight.shape[1], self._dtypes[number]
        if states.dim() == 1:  # of a micro-batch without tokens that count
            return torch.zeros(len(states), width, dtype=dtype, device=states.device)
        return states[:, : width * dtype.itemsize].view(dtype)
