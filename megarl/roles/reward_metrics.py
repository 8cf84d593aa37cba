"""Statistics of a step's scores by reward term over all replicas, and the limit on verifier failures."""

import itertools
from collections import Counter, deque
from collections.abc import Mapping

import torch
from torch import Tensor

from megarl.arguments import Settings
from megarl.batch import Batch
from megarl.comm.role_mesh import RoleGroups
from megarl.errors import TooManyFailures
from megarl.mcore import device
from megarl.rewards.expression import INFALLIBLE, Term
from megarl.roles.loss_mask import valid_sequences

WINDOW = 1000  # samples
MIN_FAILURES = 50  # of one verifier, that can end a run: fewer are chance, or one prompt's fault
MIN_SAMPLES = 8  # of which none could be scored: then the verifier itself is broken


class FailureWindow:
    """The latest calls, of at least 1,000 samples if there were so many, and how many of these failed, by verifier.

    It is not part of a checkpoint: after a resume it starts empty.
    """

    def __init__(self, allowed: float):
        """`allowed`: share of the samples; 0: the first failure is too much."""
        self.allowed, self.samples = allowed, 0
        self.failed: Counter[str] = Counter()
        self._calls: deque[tuple[int, dict[str, int]]] = deque()

    def add(self, count: int, failed: dict[str, int]):
        """Adds a call's samples and failures; drops the oldest calls that a full window does not need."""
        self._calls.append((count, failed))
        self.samples += count
        self.failed.update(failed)
        while self.samples - self._calls[0][0] >= WINDOW:
            count, failed = self._calls.popleft()
            self.samples -= count
            self.failed.subtract(failed)

    def exceeded(self, name: str) -> bool:
        """Whether the verifier `name` has failed too often, or always."""
        failed, min_failures = self.failed[name], MIN_FAILURES if self.allowed else 1
        is_broken = failed == self.samples >= MIN_SAMPLES
        return failed > self.allowed * self.samples and (failed >= min_failures or is_broken)


def step_metrics(
    batch: Batch, settings: Settings, role_groups: RoleGroups, *more: Tensor
) -> tuple[dict[str, float], int, list[float]]:
    """(metrics of a step's scored responses, number of sequences that count, sums of the scalars `more`).

    Over all replicas. A collective of the role.
    """
    valid, scores = valid_sequences(batch, settings), batch.need("scores").double()
    own = [valid.sum(), scores[valid].sum(), scores[valid].square().sum(), batch.response_mask.sum()]
    own += [batch.finished[valid].sum(), batch.need("correct")[valid].sum(), batch.lengths.sum()]
    sums = torch.stack([*own, *more]).double()
    sequences, total, squares, generated, finished, correct, tokens, *others = role_groups.dp_all_reduce(sums).tolist()
    n = max(sequences, 1.0)  # 0: every episode failed
    metrics = {
        "reward/mean": total / n,
        "reward/std": max(squares / n - (total / n) ** 2, 0.0) ** 0.5,
        "reward/accuracy": correct / n,
        "rollout/response_length_mean": generated / n,
        "rollout/finished_fraction": finished / n,
        "perf/tokens": int(tokens),
    }
    return metrics, int(sequences), others


def reasons_text(failures: list[str], role_groups: RoleGroups) -> str:
    """The first reason of each replica, on one line. A collective of the replica leaders."""
    return " | ".join(dict.fromkeys(itertools.chain(*role_groups.gather_replicas(failures[:1]))))


class RewardStatistics:
    """Counts and sums of this replica since the start of the step, on its leader."""

    def __init__(self, role_groups: RoleGroups, terms: tuple[Term, ...]):
        self.role_groups, self.names = role_groups, [term.name for term in terms]
        # Count, sum, sum of squares, seconds of calls.
        self._sums = {name: torch.zeros(4, dtype=torch.float64) for name in self.names}
        self._failures = dict.fromkeys((name for name in self.names if name not in INFALLIBLE), 0)
        self._timeouts: dict[str, int] = {}
        self._model = torch.zeros(4, dtype=torch.float64)  # texts, truncated texts, sum of ensemble deviations, 0

    def add(self, values: dict[str, list[float]]):
        """Adds the unweighted values of the terms for this replica's samples."""
        for name, column in values.items():
            column = torch.tensor(column, dtype=torch.float64)
            self._sums[name][:3] += torch.stack([torch.tensor(float(len(column))), column.sum(), column.square().sum()])

    def add_seconds(self, seconds: Mapping[str, float]):
        """Adds the seconds of calls of verifiers."""
        for name, value in seconds.items():
            self._sums[name][3] += value

    def add_ensemble(self, scores: Tensor, cut: int):
        """Adds the scores [K, N] of K models for this replica's texts; `cut` of them had their prompt truncated."""
        spread = float(scores.std(0, correction=0).sum())
        self._model[:3] += torch.tensor([scores.shape[1], cut, spread], dtype=torch.float64)

    def check_failures(
        self, failures: dict[str, list[str]], timeouts: dict[str, int], count: int, windows: dict[str, FailureWindow]
    ):
        """Counts the samples on which verifiers failed or timed out. A collective of the replica leaders.

        Args:
            failures: reasons by verifier that was used, for this replica's samples.
            timeouts: wrong answers by verifier, for this replica's samples.
            count: samples on all replicas.
            windows: of each verifier, the samples so far, of all replicas; changed.

        Raises:
            TooManyFailures: more than the allowed share of the window failed; names the first reason of each replica.
        """
        used = [name for name in self._failures if name in failures]
        if not used:
            return
        rows = [[len(failures[name]), timeouts.get(name, 0)] for name in used]
        counts = self.role_groups.dp_all_reduce(torch.tensor(rows, dtype=torch.float64).to(device.device())).tolist()
        for name, (failed, late) in zip(used, counts, strict=True):
            window = windows[name]
            window.add(count, {name: int(failed)})
            self._failures[name] += int(failed)
            if name in timeouts:
                self._timeouts[name] = self._timeouts.get(name, 0) + int(late)
            if window.exceeded(name):
                text = reasons_text(failures.get(name, []), self.role_groups)
                raise TooManyFailures(
                    f"reward {name} failed on {window.failed[name]} of {window.samples} samples; --reward-max-failures "
                    f"allows {window.allowed:g} of them; {text}"
                )

    def metrics(self) -> dict[str, float]:
        """`reward/<term>/mean` and so on, on replica leaders; {} elsewhere. A collective of the leaders."""
        if not self.role_groups.is_leader:
            return {}
        rows = torch.stack([*self._sums.values(), self._model]).to(device.device())
        *sums, (texts, cut, spread, _) = self.role_groups.dp_all_reduce(rows).tolist()
        metrics = {}
        for name, (n, total, squares, seconds) in zip(self.names, sums, strict=True):
            if seconds:
                metrics[f"time/reward/{name}/calls_s"] = seconds
            if n:
                metrics[f"reward/{name}/mean"] = total / n
                metrics[f"reward/{name}/std"] = max(squares / n - (total / n) ** 2, 0.0) ** 0.5
        if texts:
            metrics["reward/model/cut_fraction"] = cut / texts
            metrics["reward/model/disagreement"] = spread / texts
        metrics |= {f"reward/{name}/failures": count for name, count in self._failures.items()}
        return metrics | {f"reward/{name}/timeouts": count for name, count in self._timeouts.items()}
