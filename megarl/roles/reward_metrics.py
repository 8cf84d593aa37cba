"""Statistics of a step's scores by reward term over all replicas, and the limit on verifier failures."""

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.comm.role_mesh import RoleGroups
from megarl.mcore import device
from megarl.rewards.expression import MODEL, Term


class RewardStatistics:
    """Counts and sums of this replica since the start of the step, on its leader."""

    def __init__(self, role_groups: RoleGroups, terms: tuple[Term, ...]):
        self.role_groups, self.names = role_groups, [term.name for term in terms]
        self._sums = {name: torch.zeros(3, dtype=torch.float64) for name in self.names}  # count, sum, sum of squares
        self._failures = dict.fromkeys((name for name in self.names if name != MODEL), 0)
        self._model = torch.zeros(3, dtype=torch.float64)  # texts, truncated texts, sum of ensemble deviations

    def add(self, values: dict[str, list[float]]):
        """Adds the unweighted values of the terms for this replica's samples."""
        for name, column in values.items():
            column = torch.tensor(column, dtype=torch.float64)
            self._sums[name] += torch.stack([torch.tensor(float(len(column))), column.sum(), column.square().sum()])

    def add_ensemble(self, scores: Tensor, cut: int):
        """Adds the scores [K, N] of K models for this replica's texts; `cut` of them had their prompt truncated."""
        spread = float(scores.std(0, correction=0).sum())
        self._model += torch.tensor([scores.shape[1], cut, spread], dtype=torch.float64)

    def check_failures(self, failures: dict[str, list[str]], count: int, allowed: float):
        """Counts the samples on which verifiers failed. A collective of the replica leaders.

        Args:
            failures: reasons by verifier, for this replica's samples.
            count: samples on all replicas.

        Raises:
            RuntimeError: more than the allowed share failed; names the first reason of each replica.
        """
        for name, share in zip(self._failures, self._shares(failures, count), strict=True):
            self._failures[name] += round(share * count)
            if share > allowed:
                reasons = [None] * len(self.role_groups.replicas)
                dist.all_gather_object(reasons, failures.get(name, [])[:1], group=self.role_groups.pg_collection.dp)
                reasons = " | ".join(dict.fromkeys(reason for of_replica in reasons for reason in of_replica))
                raise RuntimeError(
                    f"reward {name} failed on {round(share * count)} of {count} samples; --reward-max-failures allows "
                    f"{allowed:g} of them; {reasons}"
                )

    def _shares(self, failures: dict[str, list[str]], count: int) -> list[float]:
        counts = torch.tensor([len(failures.get(name, [])) for name in self._failures], dtype=torch.float64)
        if not self._failures:
            return []
        return (self.role_groups.dp_all_reduce(counts.to(device.device())) / max(count, 1)).tolist()

    def metrics(self) -> dict[str, float]:
        """`reward/<term>/mean` and so on, on replica leaders; {} elsewhere. A collective of the leaders."""
        if not self.role_groups.is_leader:
            return {}
        rows = torch.stack([*self._sums.values(), self._model]).to(device.device())
        *sums, (texts, cut, spread) = self.role_groups.dp_all_reduce(rows).tolist()
        metrics = {}
        for name, (n, total, squares) in zip(self.names, sums, strict=True):
            if n:
                metrics[f"reward/{name}/mean"] = total / n
                metrics[f"reward/{name}/std"] = max(squares / n - (total / n) ** 2, 0.0) ** 0.5
        if texts:
            metrics["reward/model/cut_fraction"] = cut / texts
            metrics["reward/model/disagreement"] = spread / texts
        return metrics | {f"reward/{name}/failures": count for name, count in self._failures.items()}
