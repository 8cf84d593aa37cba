"""What a replica hears from the HTTP process and says to it: its leader has the link, and tells the other ranks."""

import json
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from megarl.comm.role_mesh import RoleGroups
from megarl.errors import warn
from megarl.mcore import device
from megarl.serving.links import Link, Message

FLUSH_SECONDS = 10.0  # for the last messages of a service


class CommandChannel:
    """The same messages on all ranks of a replica."""

    def __init__(self, connection: Connection | None, role_groups: RoleGroups, may_end: bool = False):
        """
        Args:
            connection: of the leader with the HTTP process; None on other ranks.
            may_end: if the HTTP process ends, the last message is "stop"; else that is an error of the leader.
        """
        self._groups, self._may_end = role_groups, may_end
        self._link = Link(connection) if connection else None

    def receive(self, seconds: float) -> list[Message]:
        """The messages that have come, after waiting up to `seconds` for the first. A collective of the replica."""
        messages = self._take(seconds)
        ranks = self._groups.replica
        if len(ranks) == 1:
            return messages
        data = json.dumps(messages).encode() if messages else b""
        size = torch.tensor([len(data)], dtype=torch.int64, device=device.device())
        dist.broadcast(size, ranks[0], group=self._groups.replica_group)
        if not int(size):
            return []
        content = torch.frombuffer(bytearray(data or bytes(int(size))), dtype=torch.uint8).to(device.device())
        dist.broadcast(content, ranks[0], group=self._groups.replica_group)
        return json.loads(bytes(content.cpu().numpy()))

    def _take(self, seconds: float) -> list[Message]:
        try:
            return self._link.receive(seconds) if self._link else []
        except ConnectionError as error:
            problem = f"the HTTP process is gone: {error}"
            if not self._may_end:
                raise ConnectionError(problem) from None
        self._link = None
        warn([f"--serve-policy: {problem}; the run goes on without the server"])
        return [{"type": "stop"}]

    def send(self, message: Message):
        """Sends a message, which is the same on all ranks, from the leader."""
        if self._link:
            self._link.send(message)

    def close(self):
        """Closes the link after what was sent."""
        if self._link:
            self._link.close(FLUSH_SECONDS)
