"""One step's data on one rank: this rank's batch for every role it works for, and the transfers between them."""

from typing import Protocol

from torch import Tensor

from megarl.batch import ACTOR_FIELDS, RESPONSE_FIELDS, Batch
from megarl.comm import exchange
from megarl.comm.role_mesh import RoleMesh
from megarl.data.prompts import PromptSet
from megarl.groups import PromptGroups
from megarl.observe.timers import Timers

ROLLOUT = "rollout"  # the role that generates
ACTOR = "actor"  # the role on whose replicas advantages are computed


class Producer(Protocol):
    """A role that computes fields of a batch."""

    name: str
    outputs: tuple[str, ...]  # fields that it computes for the actor


class TrainedRole(Protocol):
    """A role that is trained on fields that are computed on the actor's ranks."""

    name: str
    targets: tuple[str, ...]  # these fields


class StepBatch:
    """Batches by role: `step_batch["critic"]` is None on ranks that do not work for the critic.

    A role that the run does not have takes part in no transfer.
    """

    def __init__(
        self, mesh: RoleMesh, timers: Timers, dp_assignment: dict[str, Tensor], responses: Batch | None, step: int,
        prompts: PromptSet, groups: PromptGroups, extra_fields: tuple[str, ...] = (), in_evaluation: bool = False,
        actor_fields: tuple[str, ...] = (),
    ):  # fmt: skip
        """
        Args:
            dp_assignment: role -> [N] int64, the dp rank that holds each sequence of the step.
            responses: what this rank generated; None outside the rollout.
            step: number of the training step.
            prompts: the set whose lines `prompt_ids` are.
            groups: of the sequences, by prompt.
            extra_fields: fields of the responses besides those that generation fills; the same on every rank.
            in_evaluation: it is not a step's batch, but one of an evaluation.
            actor_fields: as `extra_fields`, of which only the actor gets these.
        """
        self._mesh, self._timers = mesh, timers
        self._extra_fields, self._in_evaluation = extra_fields, in_evaluation
        self._actor_fields = [*ACTOR_FIELDS, *actor_fields]
        self.dp_assignment, self.step = dp_assignment, step
        self.prompts, self.groups = prompts, groups
        self._batches: dict[str, Batch | None] = {ROLLOUT: responses}
        self._pending = exchange.PendingSends()

    def __getitem__(self, role: str) -> Batch | None:
        return self._batches.get(role)

    @property
    def count(self) -> int:
        """Sequences of the step on all replicas together."""
        return len(self.dp_assignment[ROLLOUT])

    def dispatch(self, *roles: str):
        """Sends the responses to roles that do not have them yet, to each replica its own sequences. A rank that only
        sends does not wait (`wait_sends`)."""
        for role in roles:
            if self._has(role) and role not in self._batches:
                fields = [*(self._actor_fields if role == ACTOR else RESPONSE_FIELDS), *self._extra_fields]
                self._batches[role] = self._send(self._closest_copy(role), role, fields)

    def gather(self, *producers: Producer):
        """Collects on the actor the fields that other roles have computed, their `outputs`."""
        for role in producers:
            if self._has(role.name):
                self._transfer(role.name, ACTOR, role.outputs)

    def scatter(self, role: TrainedRole):
        """Sends a role its `targets`, which are computed on the actor's ranks."""
        if self._has(role.name):
            self._transfer(ACTOR, role.name, role.targets)

    def pass_on(self, source: str, destination: str, fields: tuple[str, ...]):
        """Sends fields that a role has computed to another one that holds the same sequences."""
        if self._has(source) and self._has(destination):
            self._transfer(source, destination, fields)

    def wait_sends(self):
        """Waits until everything that this rank has sent is received; the transfers themselves do not wait for it."""
        self._pending.wait()

    def pending_sends(self, source: str, destination: str) -> exchange.PendingSends | None:
        """Collects sends between two roles for `wait_sends`; None if a rank works for both, which must receive."""
        is_disjoint = set(self._mesh[source].ranks).isdisjoint(self._mesh[destination].ranks)
        return self._pending if is_disjoint else None

    def exchange_phase(self, source: str, destination: str):
        """Context that times a transfer for the role of this rank that takes part in it."""
        role = source if self._mesh[source].is_member else destination
        return self._timers.phase(self._mesh[role].model_role, "exchange")

    def _has(self, role: str) -> bool:
        return role in self._mesh.roles

    def _closest_copy(self, role: str) -> str:
        """A role that holds the same sequences on the same ranks already, else the rollout."""
        # The actor gets fields that others lack, so it always asks the rollout.
        served = (name for name in self._batches if name != ROLLOUT and role != ACTOR)
        return next((n for n in served if exchange.is_already_there(self._mesh, n, role, self.dp_assignment)), ROLLOUT)

    def _transfer(self, source: str, destination: str, fields: tuple[str, ...]):
        received = self._send(source, destination, list(fields))
        if received is not None:
            self._batches[destination].update(received, list(fields))

    def _send(self, source: str, destination: str, fields: list[str]) -> Batch | None:
        pending = self.pending_sends(source, destination)
        with self.exchange_phase(source, destination):
            roles = source, destination
            return exchange.send(
                self._mesh, self[source], *roles, fields, self.dp_assignment, pending, self._in_evaluation
            )
