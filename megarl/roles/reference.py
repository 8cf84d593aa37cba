"""The reference role: log-probs of the policy that the run started from."""

import functools
from pathlib import Path

import torch

from megarl.arguments import RoleSettings, Settings
from megarl.checkpoint import state
from megarl.mcore import checkpoint, model, offload
from megarl.observe.timers import Timers
from megarl.roles import microbatches as mb
from megarl.roles.flow import Flow
from megarl.roles.learner import evaluate
from megarl.roles.routes import Routes
from megarl.world import Place


class Reference:
    """A frozen language model; a run without KL has none."""

    name = "reference"

    def __init__(self, settings: Settings, role: RoleSettings | None, place: Place, vocab_size: int, timers: Timers):
        self.role = role
        self.settings, self.place, self.timers, self.vocab_size = settings, place, timers, vocab_size
        self.model = self.routes = None
        self.offload, self.metrics = offload.Offload({}), {}
        if place.is_member:
            self.model = model.build_frozen(role.megatron, vocab_size, place.collection)
            self.routes = Routes(role, place, self.model)
            if role.offload:
                self.offload = offload.of_frozen(self.model)
            self.offload.timed = functools.partial(timers.phase, self.name, "offload")

    def start_from(self, folder: Path):
        """Takes the weights of a checkpoint, checked. A collective of the role."""
        with self.offload.present("weights", changed=True):
            state.load_weights(folder, self.model, self.place.collection)

    def logprobs(self, flow: Flow):
        """Fills `reference_logprobs`, at the temperature of the rollout."""
        if not self.place.is_member:
            return
        with self.timers.phase(self.name, "logprobs"):
            batch = flow[self.name]
            parts = mb.of_role(batch, torch.arange(len(batch)), self.role, self.place)
            self.routes.attach(batch, parts)
            with self.offload.present("weights"):
                results = evaluate(self.model, parts, self._forward, self.place.collection)
            self.routes.collect(parts, trained=False)
            mb.write_back(batch, "reference_logprobs", [(scores.logprobs, places) for scores, places in results])
            self.metrics = self.offload.metrics(self.name)

    def _forward(self, chunk, part) -> model.TokenScores:
        return model.token_scores(
            chunk, part.tokens, part.lengths, self.settings.temperature, self.vocab_size, part.routing
        )

    def state(self) -> dict:
        """What a checkpoint holds of this role: the run goes on against the policy it started from."""
        state = checkpoint.role_state(self.name, self.model, None, {}, self.place.collection, self.role.ranks)
        return self.offload.on_host(state)

    def restore(self, loaded: dict):
        """Takes up what `state()` was filled with."""
        with self.offload.present("weights", changed=True):
            checkpoint.load_weights(self.model, loaded["model"])
