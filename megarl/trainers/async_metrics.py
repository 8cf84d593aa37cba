"""What every rank has to tell of a step, brought to rank 0 without making anybody wait.

It goes over the store by which the ranks met, no collective: a rank that is done with a step begins the next one, while
others still learn.
"""

import pickle
from collections import deque
from datetime import timedelta

import torch.distributed as dist

from megarl.comm.role_mesh import RoleMesh


class AsyncMetrics:
    """Rank 0 reads what all ranks told of a step; the others only tell."""

    def __init__(self, mesh: RoleMesh, timeout: timedelta):
        """`timeout`: the longest that rank 0 waits for others."""
        self._mesh, self._timeout = mesh, timeout
        self._store = dist.distributed_c10d._get_default_store()
        self._own: deque[tuple[int, object]] = deque()  # steps of which rank 0 told, oldest first

    def publish(self, step: int, item):
        """Leaves what this rank has to tell of a step: anything that can be pickled. Steps come in order."""
        if self._mesh.rank:
            self._store.set(self._key(step, self._mesh.rank), pickle.dumps(item))
        else:
            self._own.append((step, item))

    def poll(self, wait: bool) -> list[tuple[int, list]]:
        """(step, what each rank told) of steps that are complete, oldest first, on rank 0; nothing elsewhere.

        `wait`: of all steps of which rank 0 told. DistStoreError when a rank does not tell in time.
        """
        found = []
        while self._own:
            step, own = self._own[0]
            keys = [self._key(step, rank) for rank in range(1, self._mesh.size)]
            if wait:
                self._store.wait(keys, self._timeout)
            elif keys and not self._store.check(keys):
                break
            found.append((step, [own, *(pickle.loads(self._store.get(key)) for key in keys)]))
            for key in keys:
                self._store.delete_key(key)
            self._own.popleft()
        return found

    @staticmethod
    def _key(step: int, rank: int) -> str:
        return f"megarl/told/{step}/{rank}"
