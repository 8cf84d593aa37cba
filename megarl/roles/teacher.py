"""The teacher role: a frozen model whose distributions the policy learns.

With `--distill reward` the teacher sends its log-prob of each response token. With `--distill loss` it sends hidden
states, and the policy's last stage forms both models' logits itself (`teacher_output`): T · H_T numbers instead of
T · V, and no token of the vocabulary is left out.
"""

from torch import Tensor

from megarl.arguments import RoleSettings, Settings
from megarl.batch import Batch
from megarl.comm import microbatches as mb
from megarl.comm.role_mesh import RoleGroups, RoleMesh
from megarl.flags.distill_settings import AVERAGE, REWARD
from megarl.mcore.model import forward_pass
from megarl.observe.timers import Timers
from megarl.roles.frozen_model import FrozenModel
from megarl.roles.policy_scores import policy_scores
from megarl.roles.trainable_model import TrainableModel
from megarl.roles.weight_refresh import WeightRefresh


class Teacher:
    """A frozen teacher on the ranks of the role."""

    name = "teacher"

    def __init__(
        self, settings: Settings, role: RoleSettings | None, role_groups: RoleGroups, vocab_size: int, timers: Timers
    ):
        """Arguments as of `Reference`. `vocab_size`: tokens that the teacher's model knows."""
        self.settings, self.role_groups = settings, role_groups
        self.vocab_size, self.timers = vocab_size, timers
        self._refresh: WeightRefresh | None = None
        self.frozen_model: FrozenModel | None = None
        if role_groups.is_member:
            self.frozen_model = FrozenModel(role, role_groups, vocab_size, timers)

    def plan_refreshes(self, mesh: RoleMesh, actor: TrainableModel | None):
        """Plans how the moving average of the actor reaches a teacher that follows it. Collective.

        `actor`: its model on this rank; None outside the role.
        """
        if self.settings.teacher == AVERAGE and (actor is not None or self.frozen_model is not None):
            self._refresh = WeightRefresh(mesh, self.name, actor, self.frozen_model, 1.0, self.timers)

    def refresh(self) -> dict[str, float]:
        """Gives a teacher that follows the actor the weights that its model has now, the average; returns metrics.
        Collective."""
        return {} if self._refresh is None else {"weights/teacher_bytes": self._refresh.run()}

    def score_batch(self, batch: Batch):
        """Fills `teacher_logprobs` or `teacher_states` of a replica's batch. A collective of the role."""
        if self.settings.distill == REWARD:
            results = self.frozen_model.forward_only(batch, self._logprobs)
            mb.write_back(batch, "teacher_logprobs", [(scores.logprobs, at) for scores, at in results])
        else:
            mb.write_back_rows(batch, "teacher_states", self.frozen_model.forward_only(batch, self._states))

    def _logprobs(self, chunk, microbatch: Batch) -> forward_pass.TokenScores:
        return policy_scores(chunk, microbatch, self.settings.teacher_temperature, self.vocab_size)

    def _states(self, chunk, microbatch: Batch) -> Tensor:
        host = microbatch.host_metadata
        return forward_pass.token_states(
            chunk, microbatch.tokens, host.lengths, microbatch.routing, host.response_mask, host.shared
        )
