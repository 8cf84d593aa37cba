"""The weight sync: brings the actor's weights to a rollout that has a model of its own.

A rollout that generates ahead takes the weights of a step later than the actor sends them. The actor then sends a copy
and trains on.
"""

import time
from collections import deque

import torch.distributed as dist

from megarl.comm.announcements import Announcements
from megarl.comm.exchange import PendingSends
from megarl.comm.role_mesh import RoleMesh
from megarl.mcore.lora.transfer import PolicyTransfer
from megarl.mcore.model import gpt
from megarl.observe.timers import Timers

UNCHANGED = {"weights/sync_bytes": 0, "weights/sync_s": 0.0}  # metrics of a rollout on the actor's module


class WeightSync:
    """Transfers the weights on the ranks of actor and rollout.

    On disjoint ranks the actor only sends and the rollout only receives; no collective makes them meet. Otherwise the
    ranks of both meet before the transfer, so that its time contains no waiting.
    """

    def __init__(
        self, mesh: RoleMesh, trained: gpt.ModelChunks | None, model: gpt.ModelChunks | None, has_factors: bool,
        verifies: bool, copies: int, timers: Timers,
    ):  # fmt: skip
        """Plans the transfer. A collective of the ranks of actor and rollout.

        Args:
            trained, model: the actor's and the rollout's on this rank; None outside the role.
            has_factors: both have low-rank factors apart from their weights.
            verifies: compares checksums of all weights after each transfer.
            copies: of the weights that may be on their way at once; 0: the actor sends them from its module, and waits.
        """
        self._actor, self._rollout = mesh["actor"], mesh["rollout"]
        self._roles = [role for role in (self._actor, self._rollout) if role.is_member]
        self._group, self._verifies, self._timers = mesh.channel("weights"), verifies, timers
        policy, of_rollout = (trained, self._actor.pg_collection), (model, self._rollout.pg_collection)
        self._transfer = PolicyTransfer(policy, of_rollout, self._group, has_factors)
        self._copies = copies
        self._sent = deque[tuple[PendingSends, int]]()  # copies on their way and their bytes of all ranks, oldest first
        self._expected: list[dict[str, int]] | None = None  # checksums of weights that are not compared yet
        self._announcements = None
        if set(self._actor.ranks).isdisjoint(self._rollout.ranks):
            self._announcements = Announcements("weights", self._actor.ranks.start, self._rollout.ranks)

    def send_copy(self) -> dict[str, float]:
        """Sends a copy of the weights, on a rank of the actor; returns metrics. Their receivers call `run`."""
        before = time.perf_counter()
        with self._timers.phase(self._actor.role, "wait"):
            self.wait_sends(self._copies - 1)
        waited = time.perf_counter() - before
        self._meet()
        start = time.perf_counter()
        with self._timers.phase(self._actor.role, "sync"):
            if self._verifies:
                self._verify()
            sends = PendingSends()
            for work, memory in self._transfer.send_copy():
                sends.hold(work, memory)
            self._sent.append((sends, self._transfer.total_bytes))
        return {
            "weights/sync_bytes": self._transfer.total_bytes,
            "weights/sync_s": time.perf_counter() - start,
            "weights/staged_bytes": sum(size for _, size in self._sent),
            "weights/slot_wait_s": waited,
        }

    def wait_sends(self, most: int = 0):
        """Waits until at most that many copies are on their way."""
        while len(self._sent) > most:
            sends, _ = self._sent.popleft()
            sends.wait()

    def is_next_there(self) -> bool:
        """Whether the actor has begun to send the next weights, on a rank of a rollout that generates ahead."""
        return self._announcements is not None and self._announcements.has_next()

    def run(self, is_checked: bool = True) -> dict[str, float]:
        """Transfers the weights; returns metrics. `is_checked`: with `verifies`, compares checksums now, which is a
        collective of a rollout that generates ahead; False: `check` comes later. RuntimeError if they differ."""
        names = [role.role for role in self._roles]
        with self._timers.phase(names[-1], "wait"):
            self._meet()
        start = time.perf_counter()
        # On a rank of both roles the time counts for the rollout.
        with self._timers.phase(names[0], "sync"), self._timers.phase(names[-1], "sync"):
            self._transfer.run()
            if self._verifies:
                self._verify()
            if is_checked:
                self.check()
        seconds = time.perf_counter() - start
        return {"weights/sync_bytes": self._transfer.total_bytes, "weights/sync_s": seconds}

    def check(self):
        """Compares the checksums of the last weights, if they were not compared yet. A collective of a rollout that
        generates ahead. RuntimeError if they differ."""
        expected, self._expected = self._expected, None
        if expected is not None:
            self._transfer.check(expected, self._rollout.pg_collection.intra_dist_opt)

    def _meet(self):
        """Waits until the actor has the weights and, on ranks of both roles, until the rollout needs them."""
        if self._announcements is None:
            dist.barrier(group=self._group)
        elif self._rollout.is_member:
            self._announcements.take()
        else:
            self._announcements.send({"begins": True})

    def _verify(self):
        if self._announcements is None:
            self._transfer.verify()
        elif self._rollout.is_member:
            self._expected = self._announcements.take()["checksums"]
        else:
            checksums = self._transfer.source_checksums(self._actor.pg_collection.intra_dist_opt)
            self._announcements.send({"checksums": checksums})
