"""The teachers as the policy's ranks see them: their output layers, for a divergence over the whole vocabulary, and the
metrics of distillation, with several teachers those of each teacher's tokens.
"""

import numpy as np
import torch
from torch import Tensor

from megarl.algorithms.kl import Divergence
from megarl.arguments import Settings
from megarl.batch import Batch
from megarl.comm.role_mesh import RoleMesh
from megarl.comm.step_batch import ACTOR
from megarl.flags.teachers import TeacherModels
from megarl.mcore.kernels.head_divergence import TeacherHead
from megarl.mcore.model.forward_pass import TeacherRows
from megarl.mcore.model.gpt import ModelChunks
from megarl.mcore.weights.head_transfer import HeadCopy
from megarl.roles.teacher import Teachers

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
