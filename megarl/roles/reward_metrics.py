"""What a step's scores come to, term by term, over all lanes; and when failing verifiers end the run."""

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.comm.role_mesh import RoleGroups
from megarl.mcore import device
from megarl.rewards.expression import MODEL, Term


class RewardStatistics:
    """Counts and sums of this lane since the step began; the lanes' leaders keep it."""

    def __init__(self, role_groups: RoleGroups, terms: tuple[Term, ...]):
        self.role_groups, self.names = role_groups, [term.name for term in terms]
        self._sums = {name: torch.zeros(3, dtype=torch.float64) for name in self.names}  # count, values, squares
        self._failures = dict.fromkeys((name for name in self.names if name != MODEL), 0)
        self._model = torch.zeros(3, dtype=torch.float64)  # texts, texts cut, deviations between the ensemble's models

    def add(self, values: dict[str, list[float]]):
        """Takes in the terms' values, before weights, of this lane's samples."""
        for name, column in values.items():
            column = torch.tensor(column, dtype=torch.float64)
            self._sums[name] += torch.stack([torch.tensor(float(len(column))), column.sum(), column.square().sum()])

    def add_ensemble(self, scores: Tensor, cut: int):
        """Takes in the models' scores [K, N] of this lane's texts, `cut` of which lost the start of their prompt."""
        spread = float(scores.std(0, correction=0).sum())
        self._model += torch.tensor([scores.shape[1], cut, spread], dtype=torch.float64)

    def check_failures(self, failures: dict[str, list[str]], count: int, allowed: float):
        """Counts the samples that verifiers failed on. A collective of the lanes' leaders.

        Args:
            failures: reasons by verifier, of this lane's samples.
            count: samples of all lanes.

        Raises:
            RuntimeError: more than the allowed share failed, with the first reason of each lane.
        """
        for name, share in zip(self._failures, self._shares(failures, count), strict=True):
            self._failures[name] += round(share * count)
            if share > allowed:
                reasons = [None] * len(self.role_groups.replicas)
                dist.all_gather_object(reasons, failures.get(name, [])[:1], group=self.role_groups.pg_collection.dp)
                told = " | ".join(dict.fromkeys(reason for part in reasons for reason in part))
                raise RuntimeError(
                    f"reward {name} failed on {round(share * count)} of {count} samples; --reward-max-failures allows "
                    f"{allowed:g} of them; {told}"
                )

    def _shares(self, failures: dict[str, list[str]], count: int) -> list[float]:
        found = torch.tensor([len(failures.get(name, [])) for name in self._failures], dtype=torch.float64)
        if not self._failures:
            return []
        return (self.role_groups.dp_all_reduce(found.to(device.device())) / max(count, 1)).tolist()

    def metrics(self) -> dict[str, float]:
        """`reward/<term>/mean` and so on, where this rank leads a lane. A collective of the lanes' leaders."""
        if not self.role_groups.is_leader:
            return {}
        rows = torch.stack([*self._sums.values(), self._model]).to(device.device())
        *sums, (texts, cut, spread) = self.role_groups.dp_all_reduce(rows).tolist()
        found = {}
        for name, (n, total, squares) in zip(self.names, sums, strict=True):
            if n:
                found[f"reward/{name}/mean"] = total / n
                found[f"reward/{name}/std"] = max(squares / n - (total / n) ** 2, 0.0) ** 0.5
        if texts:
            found["reward/model/cut_fraction"] = cut / texts
            found["reward/model/disagreement"] = spread / texts
        return found | {f"reward/{name}/failures": count for name, count in self._failures.items()}
