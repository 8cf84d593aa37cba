"""A model that is not trained: the reference model, and each reward model."""

import functools

import torch

from megarl.arguments import RoleSettings
from megarl.batch import Batch
from megarl.checkpoint.pretrained import PretrainedWeights
from megarl.comm import microbatches as mb
from megarl.comm.role_mesh import RoleGroups
from megarl.mcore.lora import adapter
from megarl.mcore.memory import offload
from megarl.mcore.model import gpt
from megarl.observe.timers import Timers
from megarl.roles.trainable_model import TrainableModel, forward_only
from megarl.router_replay.router_state import RouterState


class FrozenModel:
    """A role's frozen model on this rank; on the host between passes if the role is offloaded."""

    def __init__(
        self, role: RoleSettings, role_groups: RoleGroups, vocab_size: int, timers: Timers, value_head: bool = False
    ):
        """Builds the model. Arguments as of `TrainableModel`. A collective of the role."""
        self.role, self.role_groups = role, role_groups
        self.model = gpt.build_frozen_model(role.megatron, vocab_size, role_groups.pg_collection, value_head)
        self.router_state = RouterState(role, role_groups, self.model)
        self.offload = offload.offload_frozen(self.model) if role.offload else offload.Offload({})
        self.offload.timed = functools.partial(timers.phase, role.name, "offload")

    def load_pretrained(self, weights: PretrainedWeights):
        """Loads weights. A collective of the role."""
        with self.offload.present("weights", changed=True):
            weights.load(self.model, self.role_groups.pg_collection)

    def forward_only(self, batch: Batch, forward) -> list:
        """Runs `forward(chunk, micro-batch)` over the replica's batch: [(result, positions)] on each of its ranks."""
        microbatches = mb.role_microbatches(batch, torch.arange(len(batch)), self.role, self.role_groups)
        self.router_state.attach(batch, microbatches)
        with self.offload.present("weights"):
            results = forward_only(self.model, microbatches, forward, self.role_groups.pg_collection)
        self.router_state.add_statistics(microbatches, trained=False)
        return results


class BaseModel(FrozenModel):
    """The weights under a trained model's low-rank factors: they need no second model."""

    def __init__(self, role: RoleSettings, trained: TrainableModel):
        """`trained`: the model with the factors, in this role's layout."""
        self.role, self.role_groups = role, trained.role_groups
        self.model = trained.model
        self.router_state = RouterState(role, self.role_groups, self.model)
        self.offload, self._offload_of_trained = offload.Offload({}), trained.offload

    def forward_only(self, batch: Batch, forward) -> list:
        """Same as of `FrozenModel`, to the last bit."""
        with self._offload_of_trained.present("weights"), adapter.base_weights(self.model):
            return super().forward_only(batch, forward)
