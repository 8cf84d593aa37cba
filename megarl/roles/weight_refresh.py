"""The refresh of a frozen role: it gets the actor's weights, by a static plan, on any ranks in any layout of both."""

import contextlib

import torch
import torch.distributed as dist

from megarl.comm.role_mesh import RoleMesh
from megarl.mcore.lora import adapter
from megarl.mcore.parallel import fsdp
from megarl.mcore.weights.reshard import WeightTransfer
from megarl.mcore.weights.reshard_plan import LocalWeights
from megarl.observe.timers import Timers
from megarl.roles.frozen_model import FrozenModel
from megarl.roles.trainable_model import TrainableModel


class WeightRefresh:
    """Brings the actor's weights to a frozen role, on the ranks of both."""

    def __init__(
        self, mesh: RoleMesh, role: str, actor: TrainableModel | None, frozen: FrozenModel | None, mixup: float,
        timers: Timers,
    ):  # fmt: skip
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
        return [fsdp.rows_here(p).data for p in self._frozen.model.parameters()] if self._frozen else []


def _local_weights(model: TrainableModel | FrozenModel | None) -> LocalWeights:
    return LocalWeights(model.model, model.role_groups.pg_collection) if model else LocalWeights(None, None)
