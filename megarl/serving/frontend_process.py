"""The HTTP process of a generation server, as the ranks see it: its start, its end, and the signals meanwhile."""

import contextlib
import dataclasses
import os
import signal
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megarl.child_process import Child
from megarl.comm.role_mesh import RoleGroups
from megarl.errors import UsageError
from megarl.serving import links
from megarl.serving.command_channel import CommandChannel
from megarl.serving.configuration import FrontendConfig

END_SECONDS = 10.0  # that the HTTP process has to exit


class FrontendProcess:
    """The HTTP process as the ranks see it."""

    def __init__(self, channel: CommandChannel, url: str | None, child: Child | None):
        """`url`, `child`: on rank 0."""
        self.channel, self._url, self._child = channel, url, child
        self._signals: list[int] = []

    def take_signals(self):
        """From now on SIGTERM and SIGINT end the server."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note if self._child else signal.SIG_IGN)  # launchers send it to all ranks

    def _note(self, number: int, frame):
        if self._signals:
            os._exit(128 + number)
        self._signals.append(number)

    def is_draining(self) -> bool:
        """Whether rank 0 has got a signal: running requests end, then the server does."""
        return bool(self._signals)

    def announce(self, name: str):
        """Says on rank 0 where the server is."""
        if self._url:
            print(f"megarl: serving {name} at {self._url}", flush=True)


@contextlib.contextmanager
def connect_frontend(
    config: FrontendConfig, model_name: str, vocab_size: int, role_groups: RoleGroups, may_end: bool = False
) -> Iterator[FrontendProcess]:
    """Starts the HTTP process on rank 0 and connects each replica's leader with it. A collective of the world.

    Args:
        vocab_size: the model's.
        may_end: the ranks go on if the HTTP process ends.

    Raises:
        UsageError: the address cannot be used.
        RuntimeError: the process has failed although it may not.
    """
    child: Child | None = None
    found: list[Any] = [None]
    with contextlib.ExitStack() as stack:
        if dist.get_rank() == 0:
            replicas = len(role_groups.replicas)
            config = dataclasses.replace(
                config, model_name=model_name, vocab_size=vocab_size, replicas=replicas,
                ranks_address=_ranks_address(stack),
            )  # fmt: skip
            child = Child("megarl.serving.frontend")
            stack.callback(_end, child)
            child.send(config)
            found = [_answer(child)]
        dist.broadcast_object_list(found, src=0)
        url, *way = found[0]
        connection = links.connect(*way) if role_groups.is_leader else None
        yield FrontendProcess(CommandChannel(connection, role_groups, may_end), url if child else None, child)
        status = _end(child) if child else 0
        if status and not may_end:
            raise RuntimeError(f"the HTTP process ended with status {status}")


def _ranks_address(stack: contextlib.ExitStack) -> links.Address:
    """Where leaders connect: a Unix socket in a private folder if all ranks are on this node."""
    if os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE")) == os.environ.get("WORLD_SIZE"):
        return str(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="megarl-"))) / "leaders")
    return socket.gethostbyname(os.environ["MASTER_ADDR"]), 0


def _answer(child: Child) -> tuple[str, links.Address, bytes]:
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
