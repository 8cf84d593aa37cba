"""The reference role: log-probs of the policy that the run started from."""

from megarl.arguments import RoleSettings, Settings
from megarl.mcore import checkpoint, passes
from megarl.observe.timers import Timers
from megarl.roles import microbatches as mb
from megarl.roles.flow import Flow
from megarl.roles.frozen import Frozen
from megarl.world import Place


class Reference:
    """A frozen language model; a run without KL has none."""

    name = "reference"

    def __init__(self, settings: Settings, role: RoleSettings | None, place: Place, vocab_size: int, timers: Timers):
        self.role = role
        self.settings, self.place, self.timers, self.vocab_size = settings, place, timers, vocab_size
        self.frozen = Frozen(role, place, vocab_size, timers) if place.is_member else None
        self.metrics: dict[str, float] = {}

    def logprobs(self, flow: Flow):
        """Fills `reference_logprobs`, at the temperature of the rollout."""
        batch = flow.lacking(self.name, "reference_logprobs")
        if batch is None:
            return
        with self.timers.phase(self.name, "logprobs"):
            results = self.frozen.evaluate(batch, self._forward)
            mb.write_back(batch, "reference_logprobs", [(scores.logprobs, places) for scores, places in results])
            self.metrics = self.frozen.offload.metrics(self.name)

    def _forward(self, chunk, part) -> passes.TokenScores:
        return passes.token_scores(
            chunk, part.tokens, part.on_host.lengths, self.settings.temperature, self.vocab_size, part.routing,
            part.on_host.response_mask, part.on_host.shared,
        )  # fmt: skip

    def state(self) -> dict:
        """What a checkpoint holds of this role: the run goes on against the policy it started from."""
        state = checkpoint.role_state(self.name, self.frozen.model, None, {}, self.place.collection, self.role.ranks)
        return self.frozen.offload.on_host(state)

    def restore(self, loaded: dict):
        """Takes up what `state()` was filled with."""
        with self.frozen.offload.present("weights", changed=True):
            checkpoint.load_weights(self.frozen.model, loaded["model"])
