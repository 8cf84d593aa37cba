"""Complete groups: those that wait until a step's batch is full, and the batches that training has not ended.

Each sequence stays on the replica that generated it, and its routes on the ranks that hold the MoE layer. A replica
saves its groups with the routes of all layers, so a run with another layout can resume.
"""

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.algorithms.packed import sums_by_sequence
from megarl.arguments import Settings
from megarl.batch import FIELDS, Batch, concatenate, expand_ranges
from megarl.comm.role_mesh import RoleGroups
from megarl.groups import PromptGroups
from megarl.mcore import device
from megarl.rollout import waiting_groups
from megarl.rollout.response_log import Record
from megarl.rollout.waiting_groups import VERSIONS


class GroupBuffer:
    """Groups accepted so far, numbered from 0 in the order in which they were added."""

    def __init__(self, role_groups: RoleGroups, settings: Settings, layers: tuple[int, ...] | None = None):
        """`role_groups`: of the rollout; `layers`: numbers of the MoE layers whose routes this rank records; None if
        the run records none."""
        self.role_groups, self.settings, self.layers = role_groups, settings, layers
        self.batch: Batch | None = None  # this rank's sequences
        self.sizes: list[int] = []  # of the groups of all replicas

    def empty(self) -> "GroupBuffer":
        """A buffer for the same kind of groups."""
        return GroupBuffer(self.role_groups, self.settings, self.layers)

    def take(self) -> "GroupBuffer":
        """Another buffer with all groups, which this one loses."""
        taken = self.empty()
        taken.batch, taken.sizes, self.batch, self.sizes = self.batch, self.sizes, None, []
        return taken

    def __len__(self) -> int:
        return len(self.sizes)

    def add(self, batch: Batch, groups: PromptGroups, keep: Tensor):
        """Adds those groups of a round that `keep` [G] bool selects; `batch` is this rank's share of the round."""
        kept = batch.renumbered(groups.expand(keep))
        kept.sequence_ids += sum(self.sizes)
        self.batch = kept if self.batch is None else concatenate([self.batch, kept])
        self.sizes = self.sizes + groups.kept(keep).sizes.tolist()

    def to_record(self) -> Record | None:
        """This replica's state for `load`, on its leader; None on other ranks or without groups. Collective."""
        gathered = gather_layers(self.batch, self.layers, self.role_groups) if len(self) else None
        if gathered is None or (self.role_groups.dp_rank and not len(self.batch)):
            return None
        batch, layers = gathered
        return Record({"layers": layers, "sizes": self.sizes}, {name: getattr(batch, name) for name in batch.present()})

    def load(self, records: Iterable[Record], version: int = 0):
        """Loads the groups of a checkpoint, assigned round-robin to the rollout's present replicas.

        `records`: of each replica that saved one; `version`: of all tokens, where a run that needed no versions has
        saved none. ValueError if the fields are not those of the manifest (`waiting_groups.check`), RuntimeError if
        the routes of a layer are missing.
        """
        self.batch = concatenate([self._read(record, version) for record in records]).to(device.device())

    def _read(self, record: Record, version: int) -> Batch:
        """This replica's share of the sequences in a record."""
        fields, layers = record.fields, record.facts["layers"]
        wanted, self.sizes = waiting_groups.batch_fields(self.settings), record.facts["sizes"]
        versions = fields.pop(VERSIONS, None)
        if fields.keys() != wanted - {VERSIONS} or (versions is None and VERSIONS in wanted):
            raise ValueError(f"groups with the fields {', '.join(sorted(fields))}")
        if self.settings.has_stale_tokens:
            if versions is None:
                versions = torch.full_like(fields["tokens"], version, dtype=FIELDS[VERSIONS]["dtype"])
            fields[VERSIONS] = versions
        batch = Batch(**fields)
        if self.layers is not None:
            missing = sorted({*self.layers} - {*layers})
            if missing:
                raise RuntimeError(f"rollout: saved groups have routes of MoE layers {layers} and lack {missing}")
            batch.routes = batch.routes[:, [layers.index(layer) for layer in self.layers]]
        return own_share(batch, PromptGroups(self.sizes), self.role_groups)


class BatchQueue:
    """This rank's share of the batches by step. With `--generation-lag` it keeps them on the host for checkpoints."""

    def __init__(self, like: GroupBuffer, keeps: bool):
        """`like`: a buffer of the same kind of groups; `keeps`: batches stay until `forget`, else until `get`."""
        self._like, self._keeps = like, keeps
        self._batches: dict[int, GroupBuffer | None] = {}  # None: the step had too few groups
        self.through = 0  # the last step for which the rollout has generated

    def put(self, step: int, groups: GroupBuffer | None):
        """Adds the batch of the next step; None if it has too few groups."""
        self._batches[step], self.through = groups, step

    def get(self, step: int) -> tuple[Batch, PromptGroups] | None:
        """(this rank's share of a step's batch, the groups of all replicas); None if the step has none."""
        groups = self._batches[step]
        if groups is None:
            return None
        batch = groups.batch.to(device.device())
        if self._keeps:
            groups.batch = batch.to("cpu")
        else:
            del self._batches[step]
        return batch, PromptGroups(groups.sizes)

    def forget(self, step: int):
        """Removes the batches up to a step, which training has ended."""
        self._batches = {number: groups for number, groups in self._batches.items() if number > step}

    def steps(self) -> list[int]:
        """The steps whose batches it holds, ascending."""
        return [step for step, groups in self._batches.items() if groups is not None]

    def to_records(self) -> Iterator[tuple[int, Record | None]]:
        """(step, `GroupBuffer.to_record`) of each batch. Collective."""
        for step in self.steps():
            yield step, self._batches[step].to_record()

    def load(self, step: int, through: int, records: dict[int, Iterable[Record]], version: int):
        """Loads the batches of the steps after `step`, of which `records` are those that have one, up to `through`.

        `version`, errors: as of `GroupBuffer.load`.
        """
        self.through = through
        for number in range(step + 1, through + 1):
            self._batches[number] = groups = self._like.empty() if number in records else None
            if groups is not None:
                groups.load(records[number], version)


# -- batches of a replica's responses ----------------------------------------------------------------------------------


def forced_responses(batch: Batch) -> int:
    """How many responses have tokens of a thinking budget, in a batch in which no response has lost its mask."""
    if batch.forced is not None:  # with an environment, whose tokens are not in the mask either
        return int((sums_by_sequence(batch.forced.long(), batch.forced, batch.cu_seqlens) > 0).sum())
    return int((batch.response_lengths < batch.lengths - batch.prompt_lengths).sum())


def truncated_to(batch: Batch, longest: int, before: Tensor) -> Batch:
    """Truncates each response to `longest` new tokens, besides those [N] that it had before; a truncated response is
    not finished."""
    lengths = batch.lengths.minimum(batch.prompt_lengths + before + longest)
    every = torch.arange(len(batch), device=lengths.device)
    cut = batch.take(every, expand_ranges(batch.cu_seqlens[:-1], lengths))
    cut.lengths, cut.finished = lengths, batch.finished & (lengths == batch.lengths)
    return cut


def gather_layers(
    batch: Batch, layers: tuple[int, ...] | None, role_groups: RoleGroups
) -> tuple[Batch, list[int] | None] | None:
    """(this replica's batch on the host, numbers of the MoE layers of its routes) on its leader, None elsewhere.

    A collective of the replica.

    Args:
        layers: numbers of the MoE layers whose routes this rank has in `batch`; None: no routes are recorded.
    """
    shard, pg = None, role_groups.pg_collection
    if not dist.get_rank(pg.tp) and not dist.get_rank(pg.cp):  # others have the same
        batch = batch.to("cpu")
        shard = batch if role_groups.is_leader else Batch(routes=batch.routes), layers or ()
    shards = [shard] * len(role_groups.replica)
    if len(shards) > 1:
        gathered = shards if role_groups.is_leader else None
        dist.gather_object(shard, gathered, role_groups.replica[0], role_groups.replica_group)
    if not role_groups.is_leader:
        return None
    if layers is None:
        return batch, None
    shards = list(filter(None, shards))
    held = [layer for _, of_shard in shards for layer in of_shard]
    routes = torch.cat([of_shard.routes for of_shard, _ in shards], dim=1)
    batch.routes = routes[:, [held.index(layer) for layer in sorted(held)]]
    return batch, sorted(held)


def own_share(batch: Batch, groups: PromptGroups, role_groups: RoleGroups) -> Batch:
    """What this rank's replica takes of a batch: whole groups, round-robin. `groups`: of all replicas."""
    dp_assignment = groups.round_robin(len(role_groups.replicas))[batch.sequence_ids]
    return batch.select((dp_assignment == role_groups.dp_rank).nonzero().flatten())
