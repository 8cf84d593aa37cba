"""The reference role: log-probs of the policy that the run started from."""

from megarl.arguments import RoleSettings, Settings
from megarl.comm import microbatches as mb
from megarl.comm.role_mesh import RoleGroups
from megarl.comm.step_batch import StepBatch
from megarl.mcore.model import forward_pass
from megarl.mcore.weights import dist_checkpoint
from megarl.observe.timers import Timers
from megarl.roles.frozen_model import FrozenModel


class Reference:
    """A frozen language model; a run without KL has none."""

    name = "reference"
    outputs = ("reference_logprobs",)

    def __init__(
        self, settings: Settings, role: RoleSettings | None, role_groups: RoleGroups, vocab_size: int, timers: Timers
    ):
        self.role = role
        self.settings, self.role_groups, self.timers, self.vocab_size = settings, role_groups, timers, vocab_size
        self.frozen_model = FrozenModel(role, role_groups, vocab_size, timers) if role_groups.is_member else None
        self.metrics: dict[str, float] = {}

    def logprobs(self, step_batch: StepBatch):
        """Fills `reference_logprobs`, at the temperature of the rollout."""
        batch = step_batch[self.name]
        if batch is None:
            return
        with self.timers.phase(self.name, "logprobs"):
            results = self.frozen_model.forward_only(batch, self._forward)
            mb.write_back(batch, "reference_logprobs", [(scores.logprobs, places) for scores, places in results])
            self.metrics = self.frozen_model.offload.metrics(self.name)

    def _forward(self, chunk, part) -> forward_pass.TokenScores:
        return forward_pass.token_scores(
            chunk, part.tokens, part.host_metadata.lengths, self.settings.temperature, self.vocab_size, part.routing,
            part.host_metadata.response_mask, part.host_metadata.shared,
        )  # fmt: skip

    def state(self) -> dict:
        """What a checkpoint holds of this role: the run goes on against the policy it started from."""
        state = dist_checkpoint.role_state(
            self.name, self.frozen_model.model, None, {}, self.role_groups.pg_collection, self.role.ranks
        )
        return self.frozen_model.offload.on_host(state)

    def restore(self, loaded: dict):
        """Takes up what `state()` was filled with."""
        with self.frozen_model.offload.present("weights", changed=True):
            dist_checkpoint.load_weights(self.frozen_model.model, loaded["model"])
