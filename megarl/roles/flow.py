"""A step's data on one rank: this rank's batch for every role it works for, and the moves between them."""

from torch import Tensor

from megarl import exchange
from megarl.batch import AT_HOME, SHARED, Batch
from megarl.observe.timers import Timers
from megarl.world import World

SOURCE = "rollout"  # where text is written
HOME = "actor"  # experience is put together where the policy is


class Flow:
    """Batches by role. `flow["critic"]` is None on ranks that do not work for the critic.

    A role that the run does not have gets and gives nothing.
    """

    def __init__(
        self, world: World, timers: Timers, owners: dict[str, Tensor], rollout: Batch | None,
        known: tuple[str, ...] = (),
    ):  # fmt: skip
        """Starts with what this rank wrote (None where it wrote nothing).

        Args:
            owners: as in `exchange.send`.
            known: fields that the rollout has beyond those that writing gives; the same on every rank.
        """
        self._world, self._timers, self._owners, self._known = world, timers, owners, known
        self._batches: dict[str, Batch | None] = {SOURCE: rollout}
        self._pending = exchange.Pending()

    def __getitem__(self, role: str) -> Batch | None:
        return self._batches.get(role)

    @property
    def owners(self) -> dict[str, Tensor]:
        """Role -> [N] int64, the lane that holds each sequence of the step."""
        return self._owners

    @property
    def count(self) -> int:
        """Sequences of the step on all lanes together."""
        return len(self._owners[SOURCE])

    def lacking(self, role: str, field: str) -> Batch | None:
        """This rank's batch of a role where it has none of a field yet; None: nothing to do."""
        batch = self[role]
        return batch if batch is not None and getattr(batch, field) is None else None

    def share(self, roles: list[str]):
        """Hands the rollout to roles that have it not yet, to each lane its own sequences."""
        for role in filter(self._wants, roles):
            names = [*(AT_HOME if role == HOME else SHARED), *self._known]
            self._batches[role] = self._send(self._nearest(role), role, names)

    def collect(self, fields: dict[str, list[str]]):
        """Brings fields that other roles computed home to the actor: `{"critic": ["values"]}`."""
        for role in filter(self._has, fields):
            self._take(role, HOME, fields[role])

    def settle(self):
        """Waits until all that this rank gave is taken: a role that gives goes on at once."""
        self._pending.wait()

    def give(self, role: str, names: list[str]):
        """Sends fields computed at home to another role's sequences."""
        if self._has(role):
            self._take(HOME, role, names)

    def _has(self, role: str) -> bool:
        return role in self._world.places

    def _wants(self, role: str) -> bool:
        return self._has(role) and role not in self._batches

    def _nearest(self, role: str) -> str:
        """A role that was served before and holds the very sequences on the very ranks, else the rollout."""
        served = (name for name in self._batches if name != SOURCE and role != HOME)  # others lack what only home gets
        return next((n for n in served if exchange.is_in_place(self._world, n, role, self._owners)), SOURCE)

    def _take(self, source: str, destination: str, names: list[str]):
        arrived = self._send(source, destination, names, self._pending)
        if arrived is not None:
            self._batches[destination].update(arrived, names)

    def exchange_phase(self, source: str, destination: str):
        """Times an exchange, for the role of this rank that takes part in it."""
        me = self._world[source if self._world[source].is_member else destination].host
        return self._timers.phase(me, "exchange")

    def _send(
        self, source: str, destination: str, names: list[str], pending: exchange.Pending | None = None
    ) -> Batch | None:
        if not exchange.are_apart(self._world, source, destination):
            pending = None
        with self.exchange_phase(source, destination):
            return exchange.send(self._world, self[source], source, destination, names, self._owners, pending)
