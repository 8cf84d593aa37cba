"""The HTTP process, started by rank 0 (`frontend_process.py`) with a FrontendConfig; `run_process` answers it.

It ends with status 0 after "drain", 1 if a leader or rank 0 is lost, which the end of their connection says, 2 for a
wrong configuration. Signals that stop a run do nothing here, because rank 0 decides when to end.
"""

import asyncio
import logging
import os
import socket
import sys
from multiprocessing.connection import Connection, Listener

from megarl.child_process import parent
from megarl.serving import links
from megarl.serving.app import build_app
from megarl.serving.configuration import FrontendConfig
from megarl.serving.context import ServingContext
from megarl.serving.listening import HttpServer, run_process
from megarl.serving.replica_messages import Drain, ToFrontend
from megarl.serving.replica_pool import ReplicaState

_LAST_SECONDS = 1.0  # for answers to leave when the process ends in an error
_SWITCH_SECONDS = 2e-4  # that a thread which reads from a leader waits for the interpreter; Python's own are 5e-3

log = logging.getLogger(__name__)


class Frontend:
    """The HTTP server, and the links to the leaders."""

    def __init__(self, context: ServingContext, http: socket.socket, listener: Listener, key: bytes):
        self.config, self.pool = context.config, context.pool
        self.status = 0
        self._sockets, self._listener, self._key = [http], listener, key
        self._replicas: dict[links.Link, ReplicaState] = {}
        self._ends = False
        self._drains: asyncio.Task | None = None
        self._http = HttpServer(build_app(context), context.config.settings)

    async def serve(self, rank_0: Connection) -> int:
        """Serves until told to end; returns the exit status."""
        links.follow_all(self._listener, self._key, links.kinds_of(ToFrontend), self._receive)
        asyncio.get_running_loop().add_reader(rank_0.fileno(), self._lost_rank_0, rank_0)
        await self._http.serve(sockets=self._sockets)
        self._ends = True
        for link in self._replicas:
            await asyncio.to_thread(link.close, _LAST_SECONDS)
        return self.status

    def _lost_rank_0(self, rank_0: Connection):
        asyncio.get_running_loop().remove_reader(rank_0.fileno())
        self._fail("the program that generates has ended")

    def _receive(self, link: links.Link, came: list[ToFrontend] | ConnectionError):
        """Takes what has come from a leader: messages, or why none will come any more."""
        try:
            if isinstance(came, ConnectionError):
                raise came
            for message in came:
                if link not in self._replicas:
                    self._replicas[link] = self.pool.add(link, message)
                elif isinstance(message, Drain):
                    self._start_drain()
                else:
                    self.pool.receive(self._replicas[link], message)
        except ConnectionError as error:
            link.close()
            replica = self._replicas.get(link)
            if replica is None:
                log.warning("a leader was refused: %s", error)
            elif not self._ends:
                log.error("replica %d is lost: %s", replica.number, error)
                self._fail("a replica is lost")

    def _start_drain(self):
        if self._drains is None:
            self.pool.is_draining = True
            self._drains = asyncio.create_task(self._drain())

    async def _drain(self):
        """Finishes what runs, at most `drain_seconds` long, then ends leaders and server."""
        try:
            async with asyncio.timeout(self.config.settings.drain_seconds):
                await self.pool.idle.wait()
        except TimeoutError:
            log.warning("requests still ran after %g seconds", self.config.settings.drain_seconds)
            self.pool.fail("the server is shutting down")
        self._ends = True
        self.pool.stop()
        self._end(self.config.settings.drain_seconds)

    def _fail(self, reason: str):
        if self._ends:
            return
        self._ends, self.status = True, 1
        self.pool.fail(reason)
        asyncio.get_running_loop().call_later(1.5 * _LAST_SECONDS, os._exit, 1)
        self._end(_LAST_SECONDS)

    def _end(self, seconds: float):
        self._http.config.timeout_graceful_shutdown = max(1, int(seconds))
        self._http.should_exit = True


def main() -> int:
    """Runs the process; returns its exit status."""
    rank_0 = parent(dies_with_thread=False)  # clients get an answer when rank 0 is gone
    sys.setswitchinterval(_SWITCH_SECONDS)

    def prepare(config: FrontendConfig):
        context = ServingContext(config)
        return lambda http, listener, key: Frontend(context, http, listener, key).serve(rank_0)

    return run_process(rank_0, "megarl.serving", prepare)


if __name__ == "__main__":
    sys.exit(main())
