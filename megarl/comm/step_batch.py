"""A step's data on one rank: this rank's batch for every role it works for, and the moves between them."""

from torch import Tensor

from megarl.batch import ACTOR_FIELDS, RESPONSE_FIELDS, Batch
from megarl.comm import exchange
from megarl.comm.role_mesh import RoleMesh
from megarl.observe.timers import Timers

ROLLOUT = "rollout"  # where text is written
ACTOR = "actor"  # experience is put together where the policy is


class StepBatch:
    """Batches by role. `flow["critic"]` is None on ranks that do not work for the critic.

    A role that the run does not have gets and gives nothing.
    """

    def __init__(
        self, mesh: RoleMesh, timers: Timers, dp_assignment: dict[str, Tensor], rollout: Batch | None,
        extra_fields: tuple[str, ...] = (),
    ):  # fmt: skip
        """Starts with what this rank wrote (None where it wrote nothing).

        Args:
            dp_assignment: as in `exchange.send`.
            extra_fields: fields that the rollout has beyond those that writing gives; the same on every rank.
        """
        self._mesh, self._timers, self._dp_assignment, self._extra_fields = mesh, timers, dp_assignment, extra_fields
        self._batches: dict[str, Batch | None] = {ROLLOUT: rollout}
        self._pending = exchange.PendingSends()

    def __getitem__(self, role: str) -> Batch | None:
        return self._batches.get(role)

    @property
    def dp_assignment(self) -> dict[str, Tensor]:
        """Role -> [N] int64, the lane that holds each sequence of the step."""
        return self._dp_assignment

    @property
    def count(self) -> int:
        """Sequences of the step on all lanes together."""
        return len(self._dp_assignment[ROLLOUT])

    def batch_without(self, role: str, field: str) -> Batch | None:
        """This rank's batch of a role where it has none of a field yet; None: nothing to do."""
        batch = self[role]
        return batch if batch is not None and getattr(batch, field) is None else None

    def dispatch(self, roles: list[str]):
        """Hands the rollout to roles that have it not yet, to each lane its own sequences."""
        for role in filter(self._needs_dispatch, roles):
            names = [*(ACTOR_FIELDS if role == ACTOR else RESPONSE_FIELDS), *self._extra_fields]
            self._batches[role] = self._send(self._closest_copy(role), role, names)

    def gather(self, fields: dict[str, list[str]]):
        """Brings fields that other roles computed home to the actor: `{"critic": ["values"]}`."""
        for role in filter(self._has, fields):
            self._update_from(role, ACTOR, fields[role])

    def wait_sends(self):
        """Waits until all that this rank gave is taken: a role that gives goes on at once."""
        self._pending.wait()

    def scatter(self, role: str, names: list[str]):
        """Sends fields computed at home to another role's sequences."""
        if self._has(role):
            self._update_from(ACTOR, role, names)

    def _has(self, role: str) -> bool:
        return role in self._mesh.roles

    def _needs_dispatch(self, role: str) -> bool:
        return self._has(role) and role not in self._batches

    def _closest_copy(self, role: str) -> str:
        """A role that was served before and holds the very sequences on the very ranks, else the rollout."""
        served = (
            name for name in self._batches if name != ROLLOUT and role != ACTOR
        )  # others lack what only home gets
        return next((n for n in served if exchange.is_already_there(self._mesh, n, role, self._dp_assignment)), ROLLOUT)

    def _update_from(self, source: str, destination: str, names: list[str]):
        arrived = self._send(source, destination, names, self._pending)
        if arrived is not None:
            self._batches[destination].update(arrived, names)

    def exchange_phase(self, source: str, destination: str):
        """Times an exchange, for the role of this rank that takes part in it."""
        me = self._mesh[source if self._mesh[source].is_member else destination].model_role
        return self._timers.phase(me, "exchange")

    def _send(
        self, source: str, destination: str, names: list[str], pending: exchange.PendingSends | None = None
    ) -> Batch | None:
        if not exchange.are_disjoint(self._mesh, source, destination):
            pending = None
        with self.exchange_phase(source, destination):
            return exchange.send(self._mesh, self[source], source, destination, names, self._dp_assignment, pending)
