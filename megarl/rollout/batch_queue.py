"""The batches that the rollout has generated and training has not ended."""

from collections.abc import Iterable, Iterator

from megarl.batch import Batch
from megarl.groups import PromptGroups
from megarl.mcore import device
from megarl.rollout.group_buffer import GroupBuffer
from megarl.rollout.response_log import Record


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
