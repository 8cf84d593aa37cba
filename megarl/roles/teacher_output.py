"""The teachers' output layers on the policy's ranks, for a divergence over the whole vocabulary."""

import numpy as np
import torch
from torch import Tensor

from megarl.algorithms.divergence import Divergence
from megarl.arguments import Settings
from megarl.batch import Batch
from megarl.comm.role_mesh import RoleMesh
from megarl.comm.step_batch import ACTOR
from megarl.flags.teachers import TeacherModels
from megarl.mcore.kernels.head_divergence import TeacherHead
from megarl.mcore.model.forward_pass import TeacherRows
from megarl.mcore.model.gpt import ModelChunks
from megarl.mcore.weights.head_transfer import HeadCopy
from megarl.roles.teachers import Teachers


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
        groups = mesh[ACTOR].pg_collection, mesh.channel(teachers.name)
        held = teachers.frozen_models or [None] * len(models.models)
        self._copies = [
            HeadCopy(frozen, policy, *groups, dtype) for frozen, dtype in zip(held, self._dtypes, strict=True)
        ]
        self._heads = [
            TeacherHead(
                copy.weight, settings.teacher_temperature, role.megatron.final_logit_softcapping, divergence
            )
            for copy, role in zip(self._copies, models.models, strict=True)
            if copy.weight is not None
        ]  # fmt: skip

    def refresh(self):
        """Copies the present output layers again. A collective of the ranks of teacher and actor."""
        for copy in self._copies:
            copy.run()

    def rows(self, microbatch: Batch) -> list[TeacherRows]:
        """What `token_scores` compares a micro-batch with; none except on the ranks of the policy's last stage."""
        states, teachers = microbatch.teacher_states, microbatch.host_metadata.teacher_ids
        if len(self._heads) < 2:
            return [TeacherRows(self._states(states, number), head) for number, head in enumerate(self._heads)]
        of_tokens = np.repeat(self._model_of[teachers.numpy()], microbatch.host_metadata.lengths.numpy())
        return [
            TeacherRows(self._states(states, number), head, of_tokens == number)
            for number, head in enumerate(self._heads)
        ]

    def _states(self, states: Tensor, number: int) -> Tensor:
        """[T, H_T] the hidden states in a teacher's own width and dtype, from bytes [T, B] of the widest teacher."""
        width, dtype = self._heads[number].weight.shape[1], self._dtypes[number]
        if states.dim() == 1:  # of a micro-batch without tokens that count
            return torch.zeros(len(states), width, dtype=dtype, device=states.device)
        return states[:, : width * dtype.itemsize].view(dtype)
