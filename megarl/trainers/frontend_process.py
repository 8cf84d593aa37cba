"""The HTTP process of a generation server, as the ranks see it: its start, its end, and the signals meanwhile."""

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

from megarl import stop_signals
from megarl.comm.role_mesh import RoleGroups
from megarl.errors import UsageError
from megarl.rollout.command_channel import CommandChannel
from megarl.serving.wire import LeaderLink
from megarl.trainers.server_options import ServerOptions

END_SECONDS = 10.0  # that the HTTP process has to exit
BACKLOG = 1024  # connections that wait to be accepted


class FrontendProcess:
    """The HTTP process as the ranks see it."""

    def __init__(self, channel: CommandChannel, url: str | None, process: subprocess.Popen | None):
        """`url`, `process`: on rank 0."""
        self.channel, self._url, self._process = channel, url, process
        self._signals: list[int] = []

    def take_signals(self):
        """From now on SIGTERM and SIGINT end the server."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note if self._process else signal.SIG_IGN)  # launchers send it to all ranks

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

    def end(self, may_fail: bool):
        """Waits on rank 0 until the HTTP process has ended. RuntimeError if it failed, unless it may."""
        if self._process is None:
            return
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        status = self._process.wait(END_SECONDS)
        if status and not may_fail:
            raise RuntimeError(f"the HTTP process ended with status {status}")


@contextlib.contextmanager
def connect_frontend(
    options: ServerOptions, model_name: str, vocab_size: int, role_groups: RoleGroups, may_end: bool = False
) -> Iterator[FrontendProcess]:
    """Starts the HTTP process on rank 0 and connects each replica's leader with it. A collective of the world.

    Args:
        may_end: the ranks continue if the HTTP process ends.

    Raises:
        UsageError: the address cannot be used.
    """
    process, shared, url = None, [None, None], None
    with contextlib.ExitStack() as stack:
        if dist.get_rank() == 0:
            with _listen_http(options) as http, _listen_wire(stack) as wire:
                shared = [wire.getsockname(), secrets.token_bytes(32)]
                fds = http.fileno(), wire.fileno()
                config = options.frontend_config(model_name, vocab_size, *fds, shared[1], len(role_groups.replicas))
                process, url = _start(config.to_json(), fds, stack), _url(options, http)
        dist.broadcast_object_list(shared, src=0)
        link = LeaderLink.connect(*shared) if role_groups.is_leader else None
        frontend = FrontendProcess(CommandChannel(link, role_groups, may_end), url, process)
        yield frontend
        frontend.end(may_end)


def _start(config: str, fds: tuple[int, int], stack: contextlib.ExitStack) -> subprocess.Popen:
    command = [sys.executable, "-m", "megarl.serving.frontend"]
    with stop_signals.blocked():
        process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=fds)
    stack.callback(_kill, process)
    process.stdin.write(config.encode() + b"\n")
    process.stdin.flush()
    return process


def _url(options: ServerOptions, http: socket.socket) -> str:
    host = options.config.settings.host
    return f"http://{f'[{host}]' if ':' in host else host}:{http.getsockname()[1]}"


def _kill(process: subprocess.Popen):
    """Ends the HTTP process; it first answers its requests with an error, since the ranks have ended."""
    with contextlib.suppress(OSError):
        process.stdin.close()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()


def _listen_http(options: ServerOptions) -> socket.socket:
    host, port = options.config.settings.host, options.config.settings.port
    try:
        (family, *_, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return socket.create_server(address, family=family, backlog=BACKLOG)
    except OSError as error:
        raise UsageError(f"--host {host} --port {port}: cannot listen there: {error.strerror or error}") from None


def _listen_wire(stack: contextlib.ExitStack) -> socket.socket:
    """A socket for the leaders: a Unix one in a private folder if all ranks are on this node."""
    if os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE")) == os.environ.get("WORLD_SIZE"):
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="megarl-"))
        server = socket.socket(socket.AF_UNIX)
        server.bind(str(Path(folder) / "wire"))
        server.listen()
        return server
    return socket.create_server((socket.gethostbyname(os.environ["MASTER_ADDR"]), 0))
