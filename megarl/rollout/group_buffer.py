"""Groups that are in a step's batch before it is full: where each is held, and how they survive an interruption.

A group is a prompt with its `--samples-per-prompt` responses. Each sequence stays with the lane of the rollout that
wrote it, the routes of each MoE layer with the ranks that hold it; in a checkpoint they are whole, and any layout
takes them up.
"""

import io

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.batch import GENERATED_FIELDS, Batch, concatenate, round_robin
from megarl.comm.role_mesh import RoleMesh
from megarl.comm.step_batch import ROLLOUT
from megarl.errors import UsageError
from megarl.mcore import device


class GroupBuffer:
    """The groups that are in so far, numbered from 0 in the order in which they came."""

    def __init__(
        self,
        mesh: RoleMesh,
        samples_per_prompt: int,
        extra_fields: tuple[str, ...],
        layers: tuple[int, ...] | None = None,
    ):
        """
        Args:
            extra_fields: fields of their sequences beyond those that writing gives.
            layers: numbers of the MoE layers whose routes this rank's sequences have; None: they have none.
        """
        self.mesh, self.samples, self.extra_fields, self.layers = mesh, samples_per_prompt, extra_fields, layers
        self.clear()

    def clear(self):
        """Forgets all groups."""
        self.batch: Batch | None = None  # this rank's sequences
        self.groups = 0  # of all lanes

    def __len__(self) -> int:
        return self.groups

    def add(self, batch: Batch | None, is_in: Tensor):
        """Takes groups of a round in: this rank's share of the round, which of its groups [G] bool are wanted."""
        wanted = is_in.repeat_interleave(self.samples)
        numbers = wanted.cumsum(0) - 1 + self.groups * self.samples
        self.groups += int(is_in.sum())
        if batch is None:
            return
        where = batch.sequence_ids.device
        part = batch.select(wanted.to(where)[batch.sequence_ids].nonzero().flatten())
        part.sequence_ids = numbers.to(where)[part.sequence_ids]
        self.batch = part if self.batch is None else concatenate([self.batch, part])

    def to_bytes(self) -> bytes | None:
        """What `from_bytes` takes up, on rank 0, None when nothing waits. Collective."""
        if not len(self):
            return None
        parts = self.mesh.gather(self._held())
        if parts is None:
            return None
        replicas = [
            [part for part in parts if part and part[0] == dp_rank]
            for dp_rank in range(len(self.mesh[ROLLOUT].replicas))
        ]
        layers = None if self.layers is None else sorted(layer for part in replicas[0] for layer in part[2])
        whole, file = concatenate([_with_all_routes(dp_rank, layers) for dp_rank in replicas]), io.BytesIO()
        fields = {name: getattr(whole, name) for name in whole.present()}
        torch.save({"samples": self.samples, "layers": layers, **fields}, file)
        return file.getvalue()

    def _held(self) -> tuple[int, Batch, tuple[int, ...]] | None:
        """(lane, its batch, layers of the routes therein) of which this rank tells; None: others hold the same.

        One rank of each pipeline stage tells of the routes in its layers, the leader of the rest.
        """
        role_groups = self.mesh[ROLLOUT]
        if (
            not role_groups.is_member
            or dist.get_rank(role_groups.pg_collection.tp)
            or dist.get_rank(role_groups.pg_collection.cp)
        ):
            return None
        batch = self.batch.to("cpu")
        return role_groups.dp_rank, batch if role_groups.is_leader else Batch(routes=batch.routes), self.layers or ()

    def from_bytes(self, data: bytes):
        """Takes the groups of a checkpoint up, dealt to the rollout's present lanes.

        Raises:
            UsageError: they were sampled for a batch of another kind.
            RuntimeError: routes of a layer are missing.
        """
        fields = torch.load(io.BytesIO(data), weights_only=True)
        samples, layers = fields.pop("samples"), fields.pop("layers", None)
        wanted = {*GENERATED_FIELDS, *self.extra_fields, *(["routes"] if self.layers is not None else [])}
        if samples != self.samples or set(fields) != wanted:
            raise UsageError(
                f"--load: groups of {samples} responses wait in the checkpoint for their batch to be full; allowed "
                "are the --samples-per-prompt, --group-filter, --greedy-baseline, --partial-rollouts and "
                "--router-replay that they were sampled with"
            )
        role_groups, whole = self.mesh[ROLLOUT], Batch(**fields)
        self.groups = len(whole) // samples
        if not role_groups.is_member:
            return
        if self.layers is not None:
            missing = sorted({*self.layers} - {*layers})
            if missing:
                raise RuntimeError(f"rollout: groups wait with routes in MoE layers {layers}, without {missing}")
            whole.routes = whole.routes[:, [layers.index(layer) for layer in self.layers]]
        dp_assignment = round_robin(whole.sequence_ids, len(role_groups.replicas), samples)
        self.batch = whole.select((dp_assignment == role_groups.dp_rank).nonzero().flatten()).to(device.device())


def _with_all_routes(dp_rank: list[tuple], layers: list[int] | None) -> Batch:
    """The batch of a lane with the routes in all layers, in their order, from what its ranks tell."""
    batch = next(batch for _, batch, _ in dp_rank if batch.lengths is not None)
    if layers is not None:
        held = [layer for part in dp_rank for layer in part[2]]
        batch.routes = torch.cat([part[1].routes for part in dp_rank], dim=1)[
            :, [held.index(layer) for layer in layers]
        ]
    return batch
