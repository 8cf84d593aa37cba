"""Frames between the HTTP process and a replica: its leader receives them and forwards them to its other ranks."""

import contextlib
import json
from collections.abc import Iterator

import torch
import torch.distributed as dist

from megarl.comm.role_mesh import RoleGroups
from megarl.errors import warn
from megarl.mcore import device
from megarl.serving.wire import Frame, LeaderLink

FLUSH_SECONDS = 10.0  # for the last frames of a service


class CommandChannel:
    """The same frames on all ranks of a replica; only its leader has a link to the HTTP process."""

    def __init__(self, link: LeaderLink | None, role_groups: RoleGroups, may_end: bool = False):
        """`may_end`: if the HTTP process ends, the last frame is "stop"; else that is an error of the leader."""
        self._link, self._groups, self._may_end = link, role_groups, may_end
        self._last: list[Frame] = []  # after the HTTP process has ended

    def receive(self, seconds: float) -> list[Frame]:
        """The frames that have come, after waiting up to `seconds` for the first. A collective of the replica."""
        frames, self._last = self._last, []
        with self._survival():
            frames += self._link.receive(seconds) if self._link else []
        ranks = self._groups.replica
        if len(ranks) == 1:
            return frames
        data = json.dumps(frames).encode() if frames else b""
        size = torch.tensor([len(data)], dtype=torch.int64, device=device.device())
        dist.broadcast(size, ranks[0], group=self._groups.replica_group)
        if not int(size):
            return []
        content = torch.frombuffer(bytearray(data or bytes(int(size))), dtype=torch.uint8).to(device.device())
        dist.broadcast(content, ranks[0], group=self._groups.replica_group)
        return json.loads(bytes(content.cpu().numpy()))

    def send(self, frame: Frame):
        """Sends a frame, which is the same on all ranks, from the leader."""
        with self._survival():
            if self._link:
                self._link.send(frame)

    def close(self):
        """Closes the link after what was sent."""
        if self._link:
            self._link.flush(FLUSH_SECONDS)
            self._link.close()

    @contextlib.contextmanager
    def _survival(self) -> Iterator[None]:
        try:
            yield
        except ConnectionError as error:
            if not self._may_end:
                raise
            self._link, self._last = None, [{"type": "stop"}]
            warn([f"--serve-policy: {error}; the run goes on without the server"])
