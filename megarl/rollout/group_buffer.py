"""Complete groups: those that wait until a step's batch is full, and the batches that training has not ended.

A group is a prompt with its responses. Each sequence stays on the replica of the rollout that generated it, and its
routes on the ranks that hold the MoE layer. A replica saves its groups with the routes of all layers, so a run with
another layout can resume.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from megarl.arguments import Settings
from megarl.batch import FIELDS, Batch, concatenate
from megarl.comm.role_mesh import RoleMesh
from megarl.comm.step_batch import ROLLOUT
from megarl.groups import PromptGroups
from megarl.mcore import device
from megarl.rollout import waiting_groups
from megarl.rollout.replica_batch import gather_layers, own_share
from megarl.rollout.response_log import Record
from megarl.rollout.waiting_groups import VERSIONS


class GroupBuffer:
    """Groups accepted so far, numbered from 0 in the order in which they were added."""

    def __init__(self, mesh: RoleMesh, settings: Settings, layers: tuple[int, ...] | None = None):
        """`layers`: numbers of the MoE layers whose routes this rank records; None if the run records none."""
        self.mesh, self.settings, self.layers = mesh, settings, layers
        self.samples = settings.samples_per_prompt  # of a prompt whose file in a mixture says no number
        self.clear()

    def clear(self):
        self.batch: Batch | None = None  # this rank's sequences
        self.sizes: list[int] = []  # of the groups of all replicas

    def empty(self) -> "GroupBuffer":
        """A buffer for the same kind of groups."""
        return GroupBuffer(self.mesh, self.settings, self.layers)

    def take(self) -> "GroupBuffer":
        """Another buffer with all groups, which this one loses."""
        taken = self.empty()
        taken.batch, taken.sizes = self.batch, self.sizes
        self.clear()
        return taken

    def __len__(self) -> int:
        return len(self.sizes)

    def add(self, batch: Batch | None, groups: PromptGroups, keep: Tensor):
        """Adds those groups of a round that `keep` [G] bool selects; `batch` is this rank's share of the round."""
        if batch is not None:
            kept = batch.renumbered(groups.expand(keep))
            kept.sequence_ids += sum(self.sizes)
            self.batch = kept if self.batch is None else concatenate([self.batch, kept])
        self.sizes = self.sizes + groups.kept(keep).sizes.tolist()

    def to_record(self) -> Record | None:
        """This replica's state for `load`, on its leader; None on other ranks or without groups. Collective."""
        role_groups = self.mesh[ROLLOUT]
        if not len(self) or not role_groups.is_member:
            return None
        gathered = gather_layers(self.batch, self.layers, role_groups)
        if gathered is None or (role_groups.dp_rank and not len(self.batch)):
            return None
        batch, layers = gathered
        fields = {name: getattr(batch, name) for name in batch.present()}
        sizes = {"sizes": self.sizes} if {*self.sizes} - {self.samples} else {}  # of files with sizes of their own
        return Record({"samples": self.samples, "layers": layers, **sizes}, fields)

    def load(self, records: Iterable[Record], version: int = 0):
        """Loads the groups of a checkpoint, assigned round-robin to the rollout's present replicas.

        Args:
            records: of each replica that saved one.
            version: of all tokens, where a run that needed no versions has saved none.

        Raises:
            UsageError: the groups were sampled with other flags.
            RuntimeError: the routes of a layer are missing.
        """
        shares = [self._read(record, version) for record in records]
        sizes = next((sizes for _, sizes, _ in shares), None)
        self.sizes = sizes or [self.samples] * (sum(count for count, _, _ in shares) // self.samples)
        if self.mesh[ROLLOUT].is_member:
            self.batch = concatenate([batch for _, _, batch in shares]).to(device.device())

    def _read(self, record: Record, version: int) -> tuple[int, list[int] | None, Batch | None]:
        """(sequences in a record, sizes of all groups if there are several, this replica's share of the sequences)."""
        fields, facts = record.fields, record.facts
        samples, layers, sizes = facts["samples"], facts["layers"], facts.get("sizes")
        wanted = waiting_groups.batch_fields(self.settings)
        versions = fields.get(VERSIONS) if VERSIONS in wanted else fields.pop(VERSIONS, None)
        waiting_groups.check_complete((samples, set(fields)), (self.samples, wanted))
        if self.settings.has_stale_tokens:
            if versions is None:
                versions = torch.full_like(fields["tokens"], version, dtype=FIELDS[VERSIONS].dtype)
            fields[VERSIONS] = versions
        role_groups, batch = self.mesh[ROLLOUT], Batch(**fields)
        if not role_groups.is_member:
            return len(batch), sizes, None
        if self.layers is not None:
            missing = sorted({*self.layers} - {*layers})
            if missing:
                raise RuntimeError(f"rollout: saved groups have routes of MoE layers {layers} and lack {missing}")
            batch.routes = batch.routes[:, [layers.index(layer) for layer in self.layers]]
        groups = PromptGroups(sizes or [samples] * (1 + max(batch.sequence_ids.tolist(), default=0) // samples))
        return len(batch), sizes, own_share(batch, groups, role_groups)


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

        `version`: as of `GroupBuffer.load`.

        Raises:
            UsageError: as of `GroupBuffer.load`.
        """
        self.through = through
        for number in range(step + 1, through + 1):
            self._batches[number] = groups = self._like.empty() if number in records else None
            if groups is not None:
                groups.load(records[number], version)
