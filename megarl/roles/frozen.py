"""A model of a role that never learns: the reference's, and each of a reward role's."""

import functools
from pathlib import Path

import torch

from megarl.arguments import RoleSettings
from megarl.batch import Batch
from megarl.checkpoint import state
from megarl.mcore import model, offload
from megarl.observe.timers import Timers
from megarl.roles import microbatches as mb
from megarl.roles.learner import evaluate
from megarl.roles.routes import Routes
from megarl.world import Place


class Frozen:
    """A role's model on this rank, with its routes; on the host between its turns where the role is offloaded."""

    def __init__(self, role: RoleSettings, place: Place, vocab_size: int, timers: Timers, value_head: bool = False):
        """Builds the model. A collective of the role; arguments as of `Learner`."""
        self.role, self.place = role, place
        self.model = model.build_frozen(role.megatron, vocab_size, place.collection, value_head)
        self.routes = Routes(role, place, self.model)
        self.offload = offload.of_frozen(self.model) if role.offload else offload.Offload({})
        self.offload.timed = functools.partial(timers.phase, role.name, "offload")

    def start_from(self, folder: Path):
        """Takes the weights of a checkpoint, checked. A collective of the role."""
        with self.offload.present("weights", changed=True):
            state.load_weights(folder, self.model, self.place.collection)

    def evaluate(self, batch: Batch, forward) -> list:
        """`forward(chunk, micro-batch)` over the lane's batch: [(result, places)] on every rank of the lane."""
        parts = mb.of_role(batch, torch.arange(len(batch)), self.role, self.place)
        self.routes.attach(batch, parts)
        with self.offload.present("weights"):
            results = evaluate(self.model, parts, forward, self.place.collection)
        self.routes.collect(parts, trained=False)
        return results
