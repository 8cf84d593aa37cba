"""One step's data on one rank: this rank's batch for every role it works for, and the transfers between them."""

from collections.abc import Sequence
from dataclasses import InitVar, dataclass
from typing import Any

from torch import Tensor

from megarl.arguments import Settings
from megarl.batch import ACTOR, GENERATED, Batch, fields_sent
from megarl.comm import exchange
from megarl.comm.role_mesh import RoleMesh
from megarl.data.prompts import PromptSet
from megarl.groups import PromptGroups
from megarl.observe.timers import Timers

ROLLOUT = "rollout"  # the role that generates


@dataclass(eq=False, repr=False)
class StepBatch:
    """Batches by role, None on ranks that do not work for it. A role that the run lacks takes part in no transfer."""

    mesh: RoleMesh
    timers: Timers
    dp_assignment: dict[str, Tensor]  # role -> [N] int64, the dp rank that holds each sequence of the step
    responses: InitVar[Batch | None]  # what this rank generated; None outside the rollout
    step: int  # number of the training step
    prompts: PromptSet  # the set whose lines `prompt_ids` are
    groups: PromptGroups  # of the sequences, by prompt
    settings: Settings
    sources: Sequence[str] = (GENERATED,)  # of `batch.ON_ROLLOUT`, those that have filled the responses' fields
    in_evaluation: bool = False  # it is not a step's batch, but one of an evaluation

    def __post_init__(self, responses: Batch | None):
        self._batches: dict[str, Batch | None] = {ROLLOUT: responses}
        self._pending = exchange.PendingSends()
        self.rows: list[dict] = []  # of the samples file: the responses that this rank has scored

    def __getitem__(self, role: str) -> Batch | None:
        return self._batches.get(role)

    @property
    def count(self) -> int:
        """Sequences of the step on all replicas together."""
        return len(self.dp_assignment[ROLLOUT])

    def dispatch(self, *roles: str):
        """Sends the responses to roles that lack them, each replica's own sequences; who only sends does not wait."""
        for role in roles:
            if self._has(role) and role not in self._batches:
                fields = fields_sent(self.settings, self.sources, role)
                self._batches[role] = self._send(self._closest_copy(role), role, fields)

    def gather(self, *producers: Any):
        """Collects on the actor the fields that other roles, which say their `name`, have computed for it."""
        for role in producers:
            self.pass_on(role.name, ACTOR)

    def scatter(self, role: Any):
        """Sends a role the fields that are computed for it on the actor's ranks."""
        self.pass_on(ACTOR, role.name)

    def pass_on(self, source: str, destination: str):
        """Sends the fields that a role has computed for another one, which holds the same sequences."""
        fields = fields_sent(self.settings, [source], destination)
        if fields and self._has(source) and self._has(destination):
            received = self._send(source, destination, fields)
            if received is not None:
                self._batches[destination].update(received, fields)

    def wait_sends(self):
        """Waits until everything that this rank has sent is received; the transfers themselves do not wait for it."""
        self._pending.wait()

    def pending_sends(self, source: str, destination: str) -> exchange.PendingSends | None:
        """Collects sends between two roles for `wait_sends`; None if a rank works for both, which must receive."""
        is_disjoint = set(self.mesh[source].ranks).isdisjoint(self.mesh[destination].ranks)
        return self._pending if is_disjoint else None

    def exchange_phase(self, source: str, destination: str):
        """Context that times a transfer for the role of this rank that takes part in it."""
        role = source if self.mesh[source].is_member else destination
        return self.timers.phase(self.mesh[role].model_role, "exchange")

    def _has(self, role: str) -> bool:
        return role in self.mesh.roles

    def _closest_copy(self, role: str) -> str:
        """A role that holds the same sequences on the same ranks already, else the rollout."""
        # The actor gets fields that others lack, so it always asks the rollout.
        served = (name for name in self._batches if name != ROLLOUT and role != ACTOR)
        return next((n for n in served if exchange.is_already_there(self.mesh, n, role, self.dp_assignment)), ROLLOUT)

    def _send(self, source: str, destination: str, fields: list[str]) -> Batch | None:
        pending = self.pending_sends(source, destination)
        with self.exchange_phase(source, destination):
            return exchange.send(
                self.mesh, self[source], source, destination, fields, self.dp_assignment, pending, self.in_evaluation
            )
