"""A teacher beside a supervised run: it reads the run's batches on the ranks of its own role."""

from torch import Tensor

from megarl.arguments import RunConfig
from megarl.batch import Batch
from megarl.checkpoint.pretrained import PretrainedWeights
from megarl.comm import exchange
from megarl.comm.role_mesh import RoleMesh
from megarl.comm.step_batch import ACTOR
from megarl.observe.timers import Timers
from megarl.roles.teacher import Teacher, TeacherOutput
from megarl.roles.trainable_model import TrainableModel

READ = ["tokens", "response_mask"]


class Distiller:
    """The teacher and the policy's copy of its output layer. Every rank belongs to both roles."""

    def __init__(
        self, config: RunConfig, mesh: RoleMesh, policy: TrainableModel, policy_vocab_size: int,
        weights: PretrainedWeights | None, timers: Timers,
    ):  # fmt: skip
        """Builds and loads the teacher. `policy_vocab_size`: of a teacher without a folder, too. Collective."""
        role = config.roles["teacher"]
        vocab_size = role.model_vocab_size(policy_vocab_size)
        self._mesh, self._teacher = mesh, Teacher(config.settings, role, mesh["teacher"], vocab_size, timers)
        if weights is not None:
            self._teacher.frozen_model.load_pretrained(weights)
        self.output = TeacherOutput(config.settings, self._teacher, mesh, policy.model, role)

    def ask(self, batch: Batch, dp_assignment: dict[str, Tensor]):
        """Fills `teacher_states` of the policy's batch. `dp_assignment`: role -> [N], of its sequences. Collective."""
        read = exchange.send(self._mesh, batch, ACTOR, self._teacher.name, READ, dp_assignment)
        self._teacher.score_batch(read)
        states = list(self._teacher.outputs)
        batch.update(exchange.send(self._mesh, read, self._teacher.name, ACTOR, states, dp_assignment), states)
