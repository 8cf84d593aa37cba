"""The HTTP process: `python -m megarl.serving.frontend`, started by rank 0.

It reads its configuration as one line of JSON from stdin, which stays open: its end means that rank 0 is gone. It ends
with status 0 after "drain", 1 if a leader or rank 0 is lost, 2 for a wrong configuration. Signals that stop
a run do nothing here, because rank 0 decides when to end.
"""

import asyncio
import contextlib
import json
import logging
import os
import socket
import sys
from collections.abc import Coroutine

import uvicorn

from megarl import stop_signals
from megarl.errors import UsageError
from megarl.serving.app import build_app
from megarl.serving.configuration import FrontendConfig
from megarl.serving.context import ServingContext
from megarl.serving.wire import FrontendLink

_LAST_SECONDS = 1.0  # for answers to leave when the process ends in an error
_READ_LIMIT = 2**20  # bytes that asyncio reads ahead of a leader's frames

log = logging.getLogger(__name__)


class HttpServer(uvicorn.Server):
    """Uvicorn's server without its signal handlers."""

    @contextlib.contextmanager
    def capture_signals(self):
        """Leaves signals alone."""
        yield


class Frontend:
    """The HTTP server, and the links to the leaders."""

    def __init__(self, config: FrontendConfig, context: ServingContext):
        self.config, self.context, self.dispatcher = config, context, context.dispatcher
        self.status = 0
        self._key = bytes.fromhex(config.wire_key)
        self._ends = False
        self._tasks: set[asyncio.Task] = set()
        self._http = HttpServer(
            uvicorn.Config(
                build_app(context),
                http="h11",
                ws="none",
                loop="asyncio",
                lifespan="off",
                access_log=False,
                log_config=None,
                server_header=False,
                proxy_headers=False,
            )
        )

    async def serve(self) -> int:
        """Serves until told to end; returns the exit status."""
        http, wire = (socket.socket(fileno=number) for number in (self.config.http_fd, self.config.wire_fd))
        wire.setblocking(False)
        start = asyncio.start_unix_server if wire.family == socket.AF_UNIX else asyncio.start_server
        listener = await start(self._connected, sock=wire, limit=_READ_LIMIT)
        asyncio.get_running_loop().add_reader(sys.stdin.fileno(), self._stdin)
        await self._http.serve(sockets=[http])
        listener.close()
        return self.status

    def _stdin(self):
        if not os.read(sys.stdin.fileno(), 2**16):
            asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
            self._fail("the program that generates has ended")

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._start(self._leader(reader, writer))

    def _start(self, work: Coroutine):
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _leader(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        """One leader's connection. A peer that does not know the key is not a leader."""
        try:
            link = await FrontendLink.accept(reader, writer, self._key)
            replica = self.dispatcher.add(link, await link.receive())
        except (ConnectionError, OSError) as error:
            log.warning("a connection on the wire was refused: %s", error)
            writer.close()
            return
        try:
            while True:
                frame = await link.receive()
                if frame["type"] == "drain":
                    self._start_drain()
                else:
                    self.dispatcher.receive(replica, frame)
        except Exception as error:
            if not self._ends:
                told = error if isinstance(error, OSError) else type(error).__name__
                log.error("replica %d is lost: %s", replica.number, told)
            self._fail("a replica is lost")
        finally:
            writer.close()

    def _start_drain(self):
        if not self.dispatcher.is_draining:
            self.dispatcher.is_draining = True
            self._start(self._drain())

    async def _drain(self):
        """Finishes what runs, at most `drain_seconds` long, then ends leaders and server."""
        try:
            async with asyncio.timeout(self.config.drain_seconds):
                await self.dispatcher.idle()
        except TimeoutError:
            log.warning("requests still ran after %g seconds", self.config.drain_seconds)
            self.dispatcher.fail("the server is shutting down")
        self._ends = True
        self.dispatcher.stop()
        with contextlib.suppress(OSError):
            for replica in self.dispatcher.replicas.values():
                await replica.link.flush()
        self._end(self.config.drain_seconds)

    def _fail(self, reason: str):
        """Fails all requests, lets their answers leave, and ends with status 1."""
        if self._ends:
            return
        self._ends, self.status = True, 1
        self.dispatcher.fail(reason)
        asyncio.get_running_loop().call_later(1.5 * _LAST_SECONDS, os._exit, 1)
        self._end(_LAST_SECONDS)

    def _end(self, seconds: float):
        self._http.config.timeout_graceful_shutdown = max(1, int(seconds))
        self._http.should_exit = True


def main() -> int:
    """Runs the process; returns its exit status."""
    stop_signals.outlive()
    logging.basicConfig(level=logging.WARNING, format="megarl.serving: %(levelname)s: %(message)s", stream=sys.stderr)
    with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as stdin:
        line = stdin.readline()
    if not line:
        return 1
    try:
        config = FrontendConfig.from_json(line)
        context = ServingContext(config, config.load_encoder())
    except (UsageError, TypeError, json.JSONDecodeError) as error:
        print(f"megarl.serving: {error}", file=sys.stderr, flush=True)
        return 2

    async def run() -> int:
        return await Frontend(config, context).serve()

    return asyncio.run(run())


if __name__ == "__main__":
    sys.exit(main())
