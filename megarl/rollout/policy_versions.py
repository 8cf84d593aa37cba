"""Versions of the policy, and staleness: its updates between the policy that generated a token and the one that is
trained on it."""

import torch
from torch import Tensor

from megarl.arguments import Settings
from megarl.batch import Batch
from megarl.comm.role_mesh import RoleGroups


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

    def of_weights(self, step: int) -> int:
        """The version of the weights after a step, none older than those of the running step."""
        return self._after.get(step, self._first)

    def end_step(self, step: int, has_batch: bool):
        """Counts the update of a step; during critic warm-up a step has none, and no step with a frozen policy."""
        s = self._settings
        updates = has_batch and step > s.critic_warmup_steps and not s.debug_rollout_only
        self._after[step] = self._after[step - 1] + updates
        self._after.pop(step - 1 - s.generation_lag, None)


def staleness_of(versions: Tensor, trained_version: int) -> Tensor:
    """[T] staleness of tokens of these versions [T] of the policy. `trained_version`: of the one that trains, before
    its update. Saved rollouts (`--load-rollouts`) may have later versions, and are not stale."""
    return (trained_version - versions).clamp(min=0)


def staleness_metrics(batch: Batch, trained_version: int, settings: Settings, role_groups: RoleGroups) -> dict:
    """Metrics of the staleness of the response tokens of a batch, of which `batch` is this rank's share.

    `rollout/staleness_share_<k>` for k from 0 to `--generation-lag`, or to the oldest token if that is older.
    `trained_version`: as of `staleness_of`. A collective of the rollout.
    """
    versions = batch.versions[batch.response_mask].long()
    staleness = staleness_of(versions, trained_version)
    largest = torch.cat([staleness, staleness.new_tensor([settings.generation_lag])]).max()
    role_groups.dp_max(largest)
    counts = torch.bincount(staleness, minlength=int(largest) + 1)
    sums = role_groups.dp_all_reduce(torch.cat([torch.stack(_mixed_and_all(batch, versions)), counts]).double())
    mixed, responses, *of_ages = sums.tolist()
    count = max(sum(of_ages), 1.0)
    found = {
        "rollout/staleness": sum(age * tokens for age, tokens in enumerate(of_ages)) / count,
        "rollout/staleness_max": max((age for age, tokens in enumerate(of_ages) if tokens), default=0),
        "rollout/mixed_version_fraction": mixed / max(responses, 1.0),
        **{f"rollout/staleness_share_{age}": tokens / count for age, tokens in enumerate(of_ages)},
    }
    if settings.partial_rollouts:
        found["rollout/carried_fraction"] = sum(of_ages[1:]) / count
    return found


def _mixed_and_all(batch: Batch, versions: Tensor) -> list[Tensor]:
    """[responses with tokens of several `versions`, responses]; `versions`: of the response tokens."""
    ids = torch.repeat_interleave(torch.arange(len(batch), device=versions.device), batch.lengths)[batch.response_mask]
    oldest, newest = (
        versions.new_zeros(len(batch)).scatter_reduce(0, ids, versions, reduce, include_self=False)
        for reduce in ("amin", "amax")
    )
    return [(oldest < newest).sum(), (batch.response_lengths > 0).sum()]
