"""Finished turns of the running steps on disk (`--rollout-bank` with environments and agents).

A turn is a response to all tokens before it, and depends on nothing else. So a run that was killed plays its episodes
again, with the answers of their environments from the journal, and generates only the turns that are not here.
"""

from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from megarl.mcore.inference.generation import Completion, GenerationRequest
from megarl.rollout import bank_file
from megarl.rollout.bank import RolloutBank
from megarl.rollout.bank_file import Entry


class TurnBank(RolloutBank):
    """The bank on one rank of the rollout.

    An episode may run on another replica after a restart, so each leader reads the files of all replicas.
    """

    _count = 0  # turns that earlier attempts have left; the same on all ranks of a replica
    _by_identity: dict[bytes, Entry]  # of them, on the leader

    def begin_round(self, step: int, common: tuple, routes: Tensor | None):
        """Reads what earlier attempts of the step have left. Arguments as of `take`. A collective of the replica."""
        self._set_common(common, routes)
        if step == self._step:
            return
        self._begin(step)
        self._by_identity, self._found = {entry.identity: entry for entry in self._found}, []
        self._count = self.role_groups.broadcast_number(len(self._by_identity))
        if self._count:
            self._say(f"{self._count} turns")

    def _files_to_read(self, folder: Path) -> list[Path]:
        return self._all_files(folder)

    def find(self, requests: Iterable[tuple[int, GenerationRequest]]) -> dict[int, Completion]:
        """The turns that the bank has, by the numbers of their requests. A collective of the replica."""
        if not self._count:
            return {}
        bodies = []
        for number, request in requests if self.role_groups.is_leader else ():
            entry = self._by_identity.get(self._identity(request))
            if entry is not None and (body := self._read(entry, request)) is not None:
                bodies.append((number, body))
        return {number: bank_file.unpack(body)[2] for number, body in self.role_groups.broadcast_object(bodies)}

    def keep(self, request: GenerationRequest, completion: Completion):
        """Appends a turn, unless a round has cut it. Not a collective."""
        if self._writes:
            self._append(request, 0, completion)
