"""A model of a role that never learns: the reference's, and each of a reward role's."""

import functools
from pathlib import Path

import torch

from megarl.arguments import RoleSettings
from megarl.batch import Batch
from megarl.checkpoint import run_state
from megarl.comm import microbatches as mb
from megarl.comm.role_mesh import RoleGroups
from megarl.mcore.memory import offload
from megarl.mcore.model import gpt
from megarl.observe.timers import Timers
from megarl.roles.trainable_model import forward_only
from megarl.router_replay.router_state import RouterState


class FrozenModel:
    """A role's model on this rank, with its routes; on the host between its turns where the role is offloaded."""

    def __init__(
        self, role: RoleSettings, role_groups: RoleGroups, vocab_size: int, timers: Timers, value_head: bool = False
    ):
        """Builds the model. A collective of the role; arguments as of `TrainableModel`."""
        self.role, self.role_groups = role, role_groups
        self.model = gpt.build_frozen_model(role.megatron, vocab_size, role_groups.pg_collection, value_head)
        self.routes = RouterState(role, role_groups, self.model)
        self.offload = offload.offload_frozen(self.model) if role.offload else offload.Offload({})
        self.offload.timed = functools.partial(timers.phase, role.name, "offload")

    def load_pretrained(self, folder: Path):
        """Takes the weights of a checkpoint, checked. A collective of the role."""
        with self.offload.present("weights", changed=True):
            run_state.load_weights(folder, self.model, self.role_groups.pg_collection)

    def forward_only(self, batch: Batch, forward) -> list:
        """`forward(chunk, micro-batch)` over the lane's batch: [(result, places)] on every rank of the lane."""
        parts = mb.role_microbatches(batch, torch.arange(len(batch)), self.role, self.role_groups)
        self.routes.attach(batch, parts)
        with self.offload.present("weights"):
            results = forward_only(self.model, parts, forward, self.role_groups.pg_collection)
        self.routes.collect(parts, trained=False)
        return results
