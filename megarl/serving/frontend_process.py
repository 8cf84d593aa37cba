"""The HTTP process of a generation server, as the ranks see it: its start, what it says, signals, and its end."""

import contextlib
import dataclasses
import math
import os
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megarl.child_process import Child
from megarl.comm.role_mesh import RoleGroups
from megarl.errors import UsageError, warn
from megarl.mcore import device
from megarl.serving import links
from megarl.serving.configuration import FrontendConfig
from megarl.serving.replica_messages import Control, Drain, ToFrontend, ToReplica

END_SECONDS = 10.0  # that the HTTP process has to exit
FLUSH_SECONDS = 10.0  # for the last messages of a service
_KINDS = links.kinds_of(ToReplica)


class FrontendProcess:
    """The HTTP process as the ranks see it. Leaders have links with it, and tell the other ranks of their replicas."""

    def __init__(
        self,
        url: str,
        link: links.Link | None,
        child: Child | None,
        role_groups: RoleGroups,
        may_end: bool,
        drain_seconds: float,
    ):
        """`link`: of a leader; `child`: on rank 0.

        `may_end`: if the process ends, the last message says "stop"; else that is an error of the leader. A process
        that has not answered `drain_seconds` and `END_SECONDS` after `Drain` counts as ended.
        """
        self._url, self._link, self._child = url, link, child
        self._role_groups, self._may_end = role_groups, may_end
        self._seconds_to_end, self._must_end_by = drain_seconds + END_SECONDS, math.inf
        self._signals: list[int] = []

    def announce(self, name: str):
        """Says on rank 0 where the server is."""
        if self._child:
            print(f"megarl: serving {name} at {self._url}", flush=True)

    # -- signals -----------------------------------------------------------------------------------------------------

    def take_signals(self):
        """From now on SIGTERM and SIGINT end the server."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note if self._child else signal.SIG_IGN)  # launchers send it to all ranks

    def _note(self, number: int, _):
        if self._signals:
            os._exit(128 + number)
        self._signals.append(number)

    def is_draining(self) -> bool:
        """Whether rank 0 has got a signal: running requests end, then the server does."""
        return bool(self._signals)

    # -- messages ----------------------------------------------------------------------------------------------------

    def receive(self, seconds: float) -> list[ToReplica]:
        """The messages that have come, after waiting up to `seconds` for the first. A collective of the replica."""
        messages = self._receive(seconds)
        if len(self._role_groups.replica) == 1:
            return messages
        data = links.packet(map(links.encode, messages)) if messages else b""
        size = int(self._role_groups.broadcast(torch.tensor([len(data)], dtype=torch.int64, device=device.device())))
        if not size:  # between most steps of the engine; `broadcast_object` would always run two collectives
            return []
        content = torch.frombuffer(bytearray(data or bytes(size)), dtype=torch.uint8).to(device.device())
        return links.decode(bytes(self._role_groups.broadcast(content).cpu().numpy()), _KINDS)

    def _receive(self, seconds: float) -> list[ToReplica]:
        try:
            messages = self._link.receive(seconds) if self._link else []
            # Messages first: "stop" may have waited here while the engine was busy.
            if messages or time.monotonic() < self._must_end_by or not self._link:
                return messages
            raise ConnectionError(f"it has not ended {self._seconds_to_end:g} s after it was told to")
        except ConnectionError as error:
            problem = f"the HTTP process is gone: {error}"
            if not self._may_end:
                raise ConnectionError(problem) from None
        self._link = None
        warn([f"--serve-policy: {problem}; the run goes on without the server"])
        return [Control("stop")]

    def send(self, message: ToFrontend):
        """Sends a message, which is the same on all ranks of the replica, from its leader."""
        if isinstance(message, Drain):
            self._must_end_by = time.monotonic() + self._seconds_to_end
        if self._link:
            self._link.send(message)

    def close_link(self):
        """Closes the leader's link after what was sent."""
        if self._link:
            self._link.close(FLUSH_SECONDS)


@contextlib.contextmanager
def start_frontend(
    config: FrontendConfig, model_name: str, vocab_size: int, role_groups: RoleGroups, may_end: bool = False
) -> Iterator[FrontendProcess]:
    """Starts the HTTP process on rank 0 and connects each replica's leader with it. A collective of the world.

    UsageError for an address that cannot be used. `may_end`: the ranks go on without it; else a failure of it raises.
    """
    replicas = len(role_groups.replicas)
    config = dataclasses.replace(config, model_name=model_name, vocab_size=vocab_size, replicas=replicas)
    with contextlib.ExitStack() as stack:
        url, link, child = start_process(stack, "megarl.serving.frontend", config, role_groups, _KINDS)
        yield FrontendProcess(url, link, child, role_groups, may_end, config.settings.drain_seconds)
        status = _end(child) if child else 0
        if status and not may_end:
            raise RuntimeError(f"the HTTP process ended with status {status}")


def start_process(
    stack: contextlib.ExitStack, module: str, config: Any, role_groups: RoleGroups, kinds: links.Kinds
) -> tuple[str, links.Link | None, Child | None]:
    """Starts an HTTP process (`listening.run_process`) on rank 0, and connects each replica's leader with it.

    A collective of the world. UsageError if `config`, whose `ranks_address` is set here, is wrong. `kinds`: of its
    messages to leaders. Returns its URL; the link of a leader; the process on rank 0, which the stack ends.
    """
    child: Child | None = None
    found: list[Any] = [None]
    if dist.get_rank() == 0:
        config = dataclasses.replace(config, ranks_address=_ranks_address(stack))
        child = Child(module)
        stack.callback(_end, child)
        child.send(config)
        found = [_answer_of(child)]
    dist.broadcast_object_list(found, src=0)
    url, address, key = found[0]
    link = links.Link(links.connect(address, key), kinds) if role_groups.is_leader else None
    return url, link, child


def _ranks_address(stack: contextlib.ExitStack) -> links.Address:
    """Where leaders connect: a Unix socket in a private folder if all ranks are on this node."""
    if os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE")) == os.environ.get("WORLD_SIZE"):
        return str(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="megarl-"))) / "leaders")
    return socket.gethostbyname(os.environ["MASTER_ADDR"]), 0


def _answer_of(child: Child) -> tuple[str, links.Address, bytes]:
    """(URL, address and key for leaders) of the process. UsageError if its configuration is wrong."""
    try:
        found = child.connection.recv()
    except (EOFError, OSError):
        raise RuntimeError(f"the HTTP process ended with status {child.status()}") from None
    if isinstance(found, str):
        raise UsageError(found)
    return found


def _end(child: Child) -> int | None:
    """Ends the process; it first answers its requests that there are no ranks any more. Returns its exit status."""
    child.connection.close()
    if child.status(END_SECONDS) is None:
        child.end()
    return child.status()
