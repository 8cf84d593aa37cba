"""An HTTP process that rank 0 starts: its sockets, what it says to rank 0 at its start, and its server."""

import asyncio
import contextlib
import functools
import secrets
import socket
from collections.abc import Callable, Coroutine
from multiprocessing.connection import Connection, Listener
from typing import Any

import uvicorn

from megarl.errors import UsageError
from megarl.flags.serving import Serving
from megarl.serving.connections import LimitedProtocol, max_connections

_BACKLOG = 1024  # connections that wait to be accepted

SERVER: dict[str, Any] = {
    "ws": "none", "loop": "asyncio", "lifespan": "off", "access_log": False, "log_config": None,
    "server_header": False, "proxy_headers": False, "log_level": "error",
}  # fmt: skip
"""What all servers tell uvicorn. Its warnings are about what clients send, so clients could fill disks with them."""


class HttpServer(uvicorn.Server):
    """Uvicorn's server with limits of connections, without its signal handlers."""

    def __init__(self, app, settings: Serving):
        limits = max_connections(settings.max_connections), settings.connection_timeout
        protocol: Any = functools.partial(LimitedProtocol, *limits)
        super().__init__(uvicorn.Config(app, http=protocol, **SERVER))

    @contextlib.contextmanager
    def capture_signals(self):
        yield


def run_process(rank_0: Connection, prepare: Callable[[Any], Callable[..., Coroutine[Any, Any, int]]]) -> int:
    """Gets a configuration from rank 0, listens to clients and leaders, says where, and serves; the exit status.

    Args:
        prepare: gets the configuration, which has `settings` and `ranks_address`; returns what serves, with the sockets
            for clients and for leaders and the key that leaders must know, and returns the exit status.
    """
    try:
        config = rank_0.recv()
        http, url = listen_to_clients(config.settings)
        serve = prepare(config)
        listener, key = Listener(config.ranks_address, backlog=_BACKLOG), secrets.token_bytes(32)
        rank_0.send((url, listener.address, key))
    except UsageError as error:
        rank_0.send(str(error))
        return 2
    except (EOFError, OSError):  # rank 0 is gone
        return 1
    return asyncio.run(serve(http, listener, key))


def listen_to_clients(settings: Serving) -> tuple[socket.socket, str]:
    """(socket, its URL). UsageError for an address that cannot be used."""
    host, port = settings.host, settings.port
    try:
        (family, *_, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        http = socket.create_server(address, family=family, backlog=_BACKLOG)
        # Its connections inherit it. asyncio sets it for sockets of its own alone, and without it the second part of an
        # answer waits 40 ms for the client's acknowledgement of the first.
        http.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except OSError as error:
        raise UsageError(f"--host {host} --port {port}: cannot listen there: {error.strerror or error}") from None
    return http, f"http://{f'[{host}]' if ':' in host else host}:{http.getsockname()[1]}"
