"""Groups that are in a step's batch before it is full: where each is held, and how they survive an interruption.

A group is a prompt with its `--samples-per-prompt` responses. Each sequence stays with the lane of the rollout that
wrote it; in a checkpoint they are whole, and any layout takes them up.
"""

import io

import torch
from torch import Tensor

from megarl.batch import WRITTEN, Batch, concatenate, lane_of
from megarl.errors import UsageError
from megarl.mcore import device
from megarl.roles.flow import SOURCE
from megarl.world import World


class Waiting:
    """The groups that are in so far, numbered from 0 in the order in which they came."""

    def __init__(self, world: World, samples_per_prompt: int, known: tuple[str, ...]):
        """`known`: fields of their sequences beyond those that writing gives."""
        self.world, self.samples, self.known = world, samples_per_prompt, known
        self.clear()

    def clear(self):
        """Forgets all groups."""
        self.batch: Batch | None = None  # this rank's sequences
        self.owners = torch.zeros(0, dtype=torch.int64)  # lane of the rollout that holds each sequence

    def __len__(self) -> int:
        return len(self.owners) // self.samples

    def add(self, batch: Batch | None, is_in: Tensor):
        """Takes groups of a round in: this rank's share of the round, which of its groups [G] bool are wanted."""
        wanted = is_in.repeat_interleave(self.samples)
        numbers = wanted.cumsum(0) - 1 + len(self.owners)
        ids = wanted.nonzero().flatten()
        self.owners = torch.cat([self.owners, lane_of(ids, len(self.world[SOURCE].lanes), self.samples)])
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
        place = self.world[SOURCE]
        parts = self.world.gather(self.batch.to("cpu") if place.is_leader else None)
        if parts is None:
            return None
        whole, file = concatenate([part for part in parts if part is not None]), io.BytesIO()
        torch.save({"samples": self.samples, **{n: getattr(whole, n) for n in whole.present()}}, file)
        return file.getvalue()

    def from_bytes(self, data: bytes):
        """Takes the groups of a checkpoint up, dealt to the rollout's present lanes.

        Raises:
            UsageError: they were sampled for a batch of another kind.
        """
        fields = torch.load(io.BytesIO(data), weights_only=True)
        samples = fields.pop("samples")
        wanted = {*WRITTEN, *self.known}
        if samples != self.samples or set(fields) != wanted:
            raise UsageError(
                f"--load: groups of {samples} responses wait in the checkpoint for their batch to be full; allowed "
                "are the --samples-per-prompt, --group-filter and --greedy-baseline that they were sampled with"
            )
        place, whole = self.world[SOURCE], Batch(**fields)
        self.owners = lane_of(whole.sequence_ids, len(place.lanes), samples)
        if place.is_member:
            self.batch = whole.select((self.owners == place.lane).nonzero().flatten()).to(device.device())
