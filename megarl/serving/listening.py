"""The socket of an HTTP process, and its server."""

import contextlib
import functools
import socket
from typing import Any

import uvicorn

from megarl.errors import UsageError
from megarl.flags.server_settings import ServerSettings
from megarl.serving.connections import LimitedProtocol, max_connections

_BACKLOG = 1024  # connections that wait to be accepted


# An application without websockets, start and end, and what would say more to clients or logs than it does itself.
PLAIN: dict[str, Any] = {
    "ws": "none", "loop": "asyncio", "lifespan": "off", "access_log": False, "log_config": None,
    "server_header": False, "proxy_headers": False,
}  # fmt: skip


class HttpServer(uvicorn.Server):
    """Uvicorn's server of an application, with limits of connections and without its signal handlers."""

    def __init__(self, app: Any, settings: ServerSettings):
        limits = max_connections(settings.max_connections), settings.connection_timeout
        protocol: Any = functools.partial(LimitedProtocol, *limits)
        super().__init__(uvicorn.Config(app, http=protocol, **PLAIN))

    @contextlib.contextmanager
    def capture_signals(self):
        yield


def listen_to_clients(settings: ServerSettings) -> tuple[socket.socket, str]:
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
