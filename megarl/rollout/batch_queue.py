"""The batches that the rollout has generated and training has not ended, and the policy versions of steps."""

from collections.abc import Iterator

import torch
from torch import Tensor

from megarl.arguments import Settings
from megarl.batch import Batch
from megarl.groups import PromptGroups
from megarl.mcore import device
from megarl.rollout.group_buffer import GroupBuffer


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

    def to_bytes(self) -> Iterator[tuple[int, bytes | None]]:
        """(step, `GroupBuffer.to_bytes`) of each batch. Collective."""
        for step in self.steps():
            yield step, self._batches[step].to_bytes()

    def load(self, step: int, through: int, files: dict[int, list[tuple[bytes, str]]], version: int):
        """Loads the batches of the steps after `step`, of which `files` are those that have one, up to `through`.

        `version`: as of `GroupBuffer.from_bytes`.

        Raises:
            UsageError: as of `GroupBuffer.from_bytes`.
        """
        self.through = through
        for number in range(step + 1, through + 1):
            self._batches[number] = groups = self._like.empty() if number in files else None
            if groups is not None:
                groups.from_bytes(files[number], version)


class PolicyVersions:
    """The number of actor updates after each step: the version of the policy that generates or trains."""

    def __init__(self, settings: Settings):
        self._settings = settings
        self.restart(0, 0)

    def restart(self, step: int, version: int):
        """Begins after a step with this version."""
        self._first, self._after = version, {step: version}

    def of_step(self, step: int) -> tuple[int, int]:
        """The versions that generate and that train the batch of a step, the latter before its update."""
        return self._after.get(step - 1 - self._settings.generation_lag, self._first), self._after[step - 1]

    def after_step(self, step: int) -> int:
        """The version after a step that training has ended, of the last `--generation-lag` + 1 ones."""
        return self._after[step]

    def of_weights(self, steps: Tensor) -> Tensor:
        """The version of the weights after each of these steps, none older than those of the running step."""
        found, places = steps.unique(return_inverse=True)
        versions = [self._after.get(step, self._first) for step in found.tolist()]
        return torch.tensor(versions, dtype=steps.dtype, device=steps.device)[places]

    def end_step(self, step: int, has_batch: bool):
        """Counts the update of a step; during critic warm-up a step has none, and no step with a frozen policy."""
        s = self._settings
        updates = has_batch and step > s.critic_warmup_steps and not s.debug_rollout_only
        self._after[step] = self._after[step - 1] + updates
        self._after.pop(step - 1 - s.generation_lag, None)
