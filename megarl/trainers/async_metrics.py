"""Collects the metrics of a step from all ranks on rank 0 without a collective, so that no rank waits.

They go through the process group's store: a rank that has finished a step starts the next one while others still train.
"""

import pickle
from collections import deque
from datetime import timedelta

import torch.distributed as dist

from megarl.comm.role_mesh import RoleMesh


class AsyncMetrics:
    """All ranks publish their metrics of a step; rank 0 polls them."""

    def __init__(self, mesh: RoleMesh, timeout: timedelta):
        """`timeout`: maximum time that rank 0 waits for other ranks."""
        self._mesh, self._timeout = mesh, timeout
        self._store = dist.distributed_c10d._get_default_store()
        self._own: deque[tuple[int, object]] = deque()  # (step, item) that rank 0 published, oldest first

    def publish(self, step: int, item):
        """Publishes this rank's item of a step, any picklable object. Steps must ascend."""
        if self._mesh.rank:
            self._store.set(self._key(step, self._mesh.rank), pickle.dumps(item))
        else:
            self._own.append((step, item))

    def poll(self, wait: bool) -> list[tuple[int, list]]:
        """[(step, items by rank)] of the steps that all ranks have published, oldest first, on rank 0; [] elsewhere.

        Args:
            wait: wait until all ranks have published the steps that rank 0 has published.

        Raises:
            DistStoreError: a rank does not publish in time.
        """
        complete = []
        while self._own:
            step, own = self._own[0]
            keys = [self._key(step, rank) for rank in range(1, self._mesh.size)]
            if wait:
                self._store.wait(keys, self._timeout)
            elif keys and not self._store.check(keys):
                break
            complete.append((step, [own, *(pickle.loads(self._store.get(key)) for key in keys)]))
            for key in keys:
                self._store.delete_key(key)
            self._own.popleft()
        return complete

    @staticmethod
    def _key(step: int, rank: int) -> str:
        return f"megarl/told/{step}/{rank}"
