"""An HTTP process that rank 0 starts: its sockets, what it says to rank 0 at its start, its server and its connections.

Connections that say nothing would use up the process's file descriptors, so their number and idle time are limited.
"""

import asyncio
import contextlib
import functools
import logging
import resource
import secrets
import socket
import sys
from collections.abc import Callable, Coroutine
from multiprocessing.connection import Connection, Listener
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from megarl.errors import UsageError
from megarl.flags.serving import Serving
from megarl.serving.error_answers import RequestError
from megarl.serving.middleware import OPEN_PATHS, checked

RESERVED = 32  # further connections, for health checks and /admin
_OTHER_FILES = 128  # descriptors for the links to leaders, the listener, and what libraries open
RESERVED_SECONDS = 5.0  # that such a connection may take for the head of its request
_BACKLOG = 1024  # connections that wait to be accepted

_OFF = dict.fromkeys(("access_log", "server_header", "proxy_headers"), False)
SERVER: dict[str, Any] = {"ws": "none", "loop": "asyncio", "lifespan": "off", "log_config": None, "log_level": "error"}
SERVER |= _OFF
"""What all servers tell uvicorn. Its warnings are about what clients send, so clients could fill disks with them."""


class HttpServer(uvicorn.Server):
    """Uvicorn's server with limits of connections, without its signal handlers."""

    def __init__(self, app, settings: Serving):
        clients = max_connections(settings.max_connections)
        protocol: Any = functools.partial(LimitedProtocol, clients, settings.connection_timeout)
        super().__init__(uvicorn.Config(app, http=protocol, **SERVER))

    @contextlib.contextmanager
    def capture_signals(self):
        yield


def run_process(
    rank_0: Connection, name: str, prepare: Callable[[Any], Callable[..., Coroutine[Any, Any, int]]]
) -> int:
    """Gets a configuration from rank 0, listens to clients and leaders, says where, and serves; the exit status.

    `prepare`, of the configuration, gives what serves: (clients' socket, leaders' listener, their key) -> exit status.
    """
    logging.basicConfig(level=logging.WARNING, format=f"{name}: %(levelname)s: %(message)s", stream=sys.stderr)
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


# -- connections of clients --------------------------------------------------------------------------------------------


def max_connections(wanted: int) -> int:
    """How many clients there may be: as wanted, or what the process's limit of open files allows, which is raised."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + RESERVED + _OTHER_FILES
    if soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(1, min(wanted, soft - RESERVED - _OTHER_FILES))


class LimitedProtocol(H11Protocol):
    """uvicorn's protocol with limits: one connection."""

    def __init__(self, limit: int, seconds: float, **named: Any):
        """`limit`: of clients; `RESERVED` more are answered at `OPEN_PATHS` and below /admin alone.

        `seconds`: until the head of the first request is there, of each further one from its first byte on, and for the
        rest of a body that the application did not read. Between requests uvicorn closes idle connections.
        """
        super().__init__(**named)
        self._limit, self._head_seconds = limit, seconds
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport):  # type: ignore[override]
        """Closes the connection at once if there are too many."""
        super().connection_made(transport)
        if len(self.connections) > self._limit + RESERVED:
            transport.abort()
        elif len(self.connections) > self._limit:
            self.app, self._head_seconds = _reserved(self.app), min(self._head_seconds, RESERVED_SECONDS)
        self.app = while_open(_read_to_the_end(self.app, self._head_seconds), transport)
        self._wait_for_head()

    def data_received(self, data: bytes):
        """Takes data; the head of a request that has begun must come in time."""
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._stop_timer()
        elif self._head_timer is None and self.conn.trailing_data[0]:
            self._wait_for_head()

    def send_400_response(self, msg: str):
        """Answers what is no HTTP; in the middle of another answer it can only close the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()

    def connection_lost(self, exc: Exception | None):
        self._stop_timer()
        super().connection_lost(exc)

    def _wait_for_head(self):
        self._head_timer = self.loop.call_later(self._head_seconds, self._close_slow)

    def _close_slow(self):
        self._head_timer = None
        if self.conn.their_state is h11.IDLE:
            self.transport.close()

    def _stop_timer(self):
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


def _reserved(app):
    """The application for a connection beyond the limit: it answers only what tells and changes the server's state."""

    def check(scope):
        if scope["path"] not in OPEN_PATHS and not scope["path"].startswith("/admin/"):
            headers = {"Retry-After": "1", "Connection": "close"}
            raise RequestError(503, "too many connections", code="too_many_connections", headers=headers)

    return checked(app, check)


def while_open(app, transport: asyncio.Transport):
    """The application, of which nothing is sent once the connection is closed; where it gives up, the connection ends.

    No client can fill the log so: asyncio logs each write to a connection that its client has reset, and uvicorn each
    answer that breaks off. And an application that always has more to send lets the loop find out that nobody reads.
    """

    async def answer(scope, receive, send):
        begun = ended = cancelled = False

        async def send_open(message):
            nonlocal begun, ended
            if transport.is_closing():
                return await asyncio.sleep(0)  # then the loop says to the application that the client has gone
            begun, ended = True, message["type"] == "http.response.body" and not message.get("more_body")
            await send(message)

        try:
            await app(scope, receive, send_open)
        except asyncio.CancelledError:  # the server ends: nobody waits for the answer
            cancelled = True
        if (begun or cancelled) and not ended:
            transport.abort()
            await asyncio.sleep(0)  # uvicorn takes it for a client that has gone

    return answer


def _read_to_the_end(app, seconds: float):
    """The application, whose answers end after the body has come, but at most `seconds` after all else of them.

    A connection that is closed while its client still sends is reset: the client fails, and loses the answer.
    """

    async def answer(scope, receive, send):
        if scope["type"] != "http":
            return await app(scope, receive, send)
        comes = b"expect" not in dict(scope["headers"])  # the body; after a refusal such a client sends none

        async def noted():
            nonlocal comes
            message = await receive()
            comes = bool(message.get("more_body"))
            return message

        async def send_all(message):
            if comes and message["type"] == "http.response.body" and not message.get("more_body"):
                await send({**message, "more_body": True})
                message = {"type": "http.response.body"}
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(seconds):
                        while comes:
                            await noted()
            await send(message)

        return await app(scope, noted, send_all)

    return answer
