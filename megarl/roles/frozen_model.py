"""A model that is not trained (reference, teacher, reward model), and its refresh with the actor's weights."""

import contextlib
import functools

import torch
import torch.distributed as dist

from megarl.arguments import RoleSettings
from megarl.batch import Batch
from megarl.checkpoint.pretrained import PretrainedWeights
from megarl.comm import microbatches as mb
from megarl.comm.role_mesh import RoleGroups, RoleMesh
from megarl.mcore import offload
from megarl.mcore.lora import adapter
from megarl.mcore.model import gpt
from megarl.mcore.parallel import fsdp
from megarl.mcore.weights.reshard import WeightTransfer
from megarl.mcore.weights.reshard_plan import LocalWeights, model_weights
from megarl.observe.timers import Timers
from megarl.roles.passes import forward_only
from megarl.roles.trainable_model import TrainableModel
from megarl.router_replay.router_state import RouterState


class FrozenModel:
    """A role's frozen model on this rank; on the host between passes if the role is offloaded."""

    def __init__(
        self,
        role: RoleSettings,
        role_groups: RoleGroups,
        vocab_size: int,
        timers: Timers,
        trained: TrainableModel | None = None,
    ):
        """Builds the model, with a scalar head if the role has one. Arguments as of `TrainableModel`. A collective of
        the role.

        `trained`: a model in this role's layout; the frozen one is then the weights under its low-rank factors, which
        need no second model.
        """
        self.role, self.role_groups, self._trained = role, role_groups, trained
        if trained is None:
            pg_collection, has_scalar_head = role_groups.pg_collection, role.has_scalar_head
            self.model = gpt.build_frozen_model(role.megatron, vocab_size, pg_collection, has_scalar_head)
        else:
            self.role_groups, self.model = trained.role_groups, trained.model
        self.router_state = RouterState(role, self.role_groups, self.model)
        is_moved = role.offload and trained is None
        self.offload = offload.offload_frozen(self.model) if is_moved else offload.Offload({})
        self.offload.timed = functools.partial(timers.phase, role.name, "offload")

    def load_pretrained(self, weights: PretrainedWeights):
        """Loads weights. A collective of the role."""
        with self.offload.present("weights", changed=True):
            weights.load(self.model, self.role_groups.pg_collection)

    def forward_only(self, batch: Batch, forward) -> list:
        """Runs `forward(chunk, micro-batch)` over the replica's batch: [(result, positions)] on each of its ranks."""
        microbatches = mb.role_microbatches(batch, torch.arange(len(batch)), self.role, self.role_groups)
        self.router_state.attach(batch, microbatches)
        with contextlib.ExitStack() as stack:
            if self._trained is None:
                stack.enter_context(self.offload.present("weights"))
            else:
                stack.enter_context(self._trained.offload.present("weights"))
                stack.enter_context(adapter.base_weights(self.model))
            results = forward_only(self.model, microbatches, forward, self.role_groups.pg_collection)
        self.router_state.add_statistics(microbatches, trained=False)
        return results


class WeightRefresh:
    """Brings the actor's weights to a frozen role, on the ranks of both."""

    def __init__(
        self,
        mesh: RoleMesh,
        role: str,
        actor: TrainableModel | None,
        frozen: FrozenModel | None,
        mixup: float,
        timers: Timers,
    ):
        """Plans the transfer. A collective of the ranks of actor and role.

        Args:
            role: the frozen role, and the name of its channel.
            actor, frozen: this rank's models; None outside the role.
            mixup: α of w_frozen ← α·w + (1 − α)·w_frozen.
        """
        self._actor, self._frozen = actor, frozen
        self._mixup, self._timers = mixup, timers
        self._group = mesh.channel(role)
        self._roles = [name for name, model in (("actor", actor), (role, frozen)) if model is not None]
        self._transfer = WeightTransfer(_local_weights(actor), _local_weights(frozen), self._group)

    def run(self) -> int:
        """Refreshes the role; returns the bytes that all ranks send. They meet first, so that its time contains no
        waiting."""
        with contextlib.ExitStack() as stack:
            with self._timers.phase(self._roles[-1], "wait"):
                dist.barrier(group=self._group)
            for role in self._roles:  # on a rank of both the time counts for the frozen role
                stack.enter_context(self._timers.phase(role, "sync"))
            self._run()
        return self._transfer.total_bytes

    @torch.no_grad()
    def _run(self):
        with contextlib.ExitStack() as stack:
            if self._actor:
                stack.enter_context(self._actor.offload.present("weights"))
                stack.enter_context(adapter.folded_weights(self._actor.model))
            if self._frozen:
                stack.enter_context(self._frozen.offload.present("weights", changed=True))
            weights = self._weights() if self._mixup < 1 else []
            before = [weight.cpu() if weight.is_cuda else weight.clone() for weight in weights]
            self._transfer.run()
            for weight, old in zip(weights, before, strict=True):
                kept = old.to(weight.device).float()
                weight.copy_(kept.lerp_(weight.float(), self._mixup))
        self._transfer.free_staging()

    def _weights(self) -> list[torch.Tensor]:
        """This rank's rows of the frozen role's parameters; [] outside the role."""
        return [fsdp.rows_here(p) for p in self._frozen.model.parameters()] if self._frozen else []


def _local_weights(model: TrainableModel | FrozenModel | None) -> LocalWeights:
    return model_weights(model.model, model.role_groups.pg_collection) if model else model_weights(None, None)
