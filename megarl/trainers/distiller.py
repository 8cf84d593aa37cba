"""Teachers beside a supervised run: they read the run's batches on the ranks of their own role."""

from torch import Tensor

from megarl.arguments import RunConfig
from megarl.batch import Batch
from megarl.checkpoint.pretrained import PretrainedWeights
from megarl.comm import exchange
from megarl.comm.role_mesh import RoleMesh
from megarl.comm.step_batch import ACTOR
from megarl.observe.timers import Timers
from megarl.roles.teacher_output import TeacherOutput
from megarl.roles.teachers import Teachers
from megarl.roles.trainable_model import TrainableModel

READ = ["tokens", "response_mask"]


class Distiller:
    """The teachers and the policy's copies of their output layers. Every rank belongs to both roles."""

    def __init__(
        self, config: RunConfig, mesh: RoleMesh, policy: TrainableModel, policy_vocab_size: int,
        weights: list[PretrainedWeights | None], timers: Timers,
    ):  # fmt: skip
        """Builds and loads the teachers. `policy_vocab_size`: of a teacher without a folder, too. Collective."""
        self._mesh, self._teachers = mesh, Teachers(config, mesh["teacher"], policy_vocab_size, timers)
        self._teachers.load(weights)
        self.output = TeacherOutput(config.settings, self._teachers, mesh, policy.model, config.teachers)

    def ask(self, batch: Batch, dp_assignment: dict[str, Tensor], teacher_ids: Tensor | None):
        """Fills `teacher_states` of the policy's batch. Collective.

        Args:
            dp_assignment: role -> [N], of its sequences.
            teacher_ids: [n] int64, of this replica's sequences; None: there is one teacher.
        """
        sent = READ
        if teacher_ids is not None:
            batch.teacher_ids, sent = teacher_ids.to(batch.lengths.device), [*READ, "teacher_ids"]
        read = exchange.send(self._mesh, batch, ACTOR, self._teachers.name, sent, dp_assignment)
        self._teachers.score_batch(read)
        states = list(self._teachers.outputs)
        batch.update(exchange.send(self._mesh, read, self._teachers.name, ACTOR, states, dp_assignment), states)
