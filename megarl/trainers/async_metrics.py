"""Collects the metrics of a step from all ranks on rank 0 without a collective, so that no rank waits.

They go through the process group's store: a rank that has finished a step starts the next one while others still train.
Anyone who reaches the store's port can write to it, so reports are plain JSON, checked when read. They are cut into
pieces: a TCPStore closes the connection on a value above 8 MiB.
"""

import json
from collections import deque
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist

from megarl.comm.role_mesh import RoleMesh

PIECE_BYTES = 4 << 20  # of a report, per value in the store
MAX_PIECES = 1024  # of a report


class StepReport(NamedTuple):
    """What a rank reports of a step."""

    metrics: dict[str, float]
    times: dict[tuple[str, str], float]  # result of `Timers.end_step`
    seconds: float  # since the previous report
    samples: list[dict]  # rows of the samples file

    def encode(self) -> bytes:
        """The report as JSON. Finite floats read back as the same number; NaN and infinities are kept.

        Raises TypeError if a value is neither a number, text, a list nor a dict of these.
        """
        times = [[role, phase, seconds] for (role, phase), seconds in self.times.items()]
        return json.dumps([self.metrics, times, self.seconds, self.samples], default=_scalar).encode("ascii")

    @classmethod
    def decode(cls, data: bytes) -> "StepReport":
        """The report from JSON. Raises ValueError for anything that `encode` does not write."""
        item = json.loads(data)
        if not isinstance(item, list) or len(item) != 4:
            raise ValueError("not a list of metrics, times, seconds and samples")
        metrics, times, seconds, samples = item
        if not isinstance(metrics, dict) or not all(map(_is_number, metrics.values())):
            raise ValueError("a metric is not a number")
        if not isinstance(times, list) or not all(map(_is_time, times)) or not _is_number(seconds):
            raise ValueError("a time is not a number")
        if not isinstance(samples, list) or not all(isinstance(row, dict) and "sequence" in row for row in samples):
            raise ValueError("a sample is not a row of the samples file")
        by_phase = {(role, phase): spent for role, phase, spent in times}
        return cls(metrics=metrics, times=by_phase, seconds=seconds, samples=samples)


def _scalar(value):
    """A NumPy or torch scalar as a Python number."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return value.item()
    raise TypeError(f"a report holds a {type(value).__name__}")


def _is_number(value) -> bool:
    return value is None or isinstance(value, (int, float))


def _is_time(entry) -> bool:
    is_triple = isinstance(entry, list) and len(entry) == 3
    return is_triple and isinstance(entry[0], str) and isinstance(entry[1], str) and _is_number(entry[2])


class AsyncMetrics:
    """All ranks publish their report of a step; rank 0 polls them."""

    def __init__(self, mesh: RoleMesh, timeout: timedelta):
        """`timeout`: maximum time that rank 0 waits for other ranks."""
        self._mesh, self._timeout = mesh, timeout
        self._store = dist.distributed_c10d._get_default_store()
        self._own: deque[tuple[int, StepReport]] = deque()  # (step, report) that rank 0 published, oldest first

    def publish(self, step: int, report: StepReport):
        """Publishes this rank's report of a step. Steps must ascend."""
        if not self._mesh.rank:
            self._own.append((step, report))
            return
        data, key = report.encode(), self._key(step, self._mesh.rank)
        pieces = [data[start : start + PIECE_BYTES] for start in range(0, len(data), PIECE_BYTES)]
        for number, piece in enumerate(pieces):
            self._store.set(f"{key}/{number}", piece)  # type: ignore[arg-type]  # takes bytes, too
        self._store.set(key, str(len(pieces)))  # last: rank 0 looks for it

    def poll(self, wait: bool) -> list[tuple[int, list[StepReport]]]:
        """[(step, reports by rank)] of the steps that all ranks have published, oldest first, on rank 0; [] elsewhere.

        Args:
            wait: wait until all ranks have published the steps that rank 0 has published.

        Raises:
            DistStoreError: a rank does not publish in time.
            RuntimeError: a report in the store is damaged.
        """
        complete = []
        while self._own:
            step, own = self._own[0]
            keys = [self._key(step, rank) for rank in range(1, self._mesh.size)]
            if wait:
                self._store.wait(keys, self._timeout)
            elif keys and not self._store.check(keys):
                break
            complete.append((step, [own, *(self._take(step, rank) for rank in range(1, self._mesh.size))]))
            self._own.popleft()
        return complete

    def _take(self, step: int, rank: int) -> StepReport:
        """Reads and deletes a rank's report."""
        key = self._key(step, rank)
        try:
            count = int(self._store.get(key))
            if not 0 < count <= MAX_PIECES:
                raise ValueError(f"{count} pieces")
            names = [f"{key}/{number}" for number in range(count)]
            if not self._store.check(names):  # `get` would wait for it
                raise ValueError("a piece is missing")
            report = StepReport.decode(b"".join(map(self._store.get, names)))
        except (ValueError, RecursionError) as error:
            raise RuntimeError(f"the report of rank {rank} on step {step} is damaged: {error}") from None
        for name in (key, *names):
            self._store.delete_key(name)
        return report

    @staticmethod
    def _key(step: int, rank: int) -> str:
        return f"megarl/report/{step}/{rank}"
