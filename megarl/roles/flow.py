"""A step's data on one rank: this rank's batch for every role it works for, and the moves between them."""

from megarl import exchange
from megarl.batch import Batch
from megarl.observe.timers import Timers
from megarl.world import World

HOME = "actor"  # experience is put together where the policy is
SHARED = ["tokens", "response_mask", "prompt_ids", "prompt_lengths", "finished"]


class Flow:
    """Batches by role. `flow["critic"]` is None on ranks that do not work for the critic."""

    def __init__(self, world: World, timers: Timers, samples_per_prompt: int, rollout: Batch | None):
        self._world, self._timers, self._samples = world, timers, samples_per_prompt
        self._batches: dict[str, Batch | None] = {HOME: rollout}

    def __getitem__(self, role: str) -> Batch | None:
        return self._batches.get(role)

    def share(self, roles: list[str]):
        """Hands the rollout to other roles, to each lane its own sequences."""
        for role in roles:
            self._batches[role] = self._send(HOME, role, SHARED)

    def collect(self, fields: dict[str, list[str]]):
        """Brings fields that other roles computed home to the actor: `{"critic": ["values"]}`."""
        for role, names in fields.items():
            self._take(role, HOME, names)

    def give(self, role: str, names: list[str]):
        """Sends fields computed at home to another role's sequences."""
        self._take(HOME, role, names)

    def _take(self, source: str, destination: str, names: list[str]):
        arrived = self._send(source, destination, names)
        if arrived is not None:
            self._batches[destination].update(arrived, names)

    def _send(self, source: str, destination: str, names: list[str]) -> Batch | None:
        me = source if self._world[source].is_member else destination
        with self._timers.phase(me, "exchange"):
            return exchange.send(self._world, self[source], source, destination, names, self._samples)
