"""The HTTP process of sessions, started by rank 0: `python -m megarl.environments.sessions.front FD`. Imports no torch.

Rank 0 sends it a `SessionsConfig`. The answer is (URL for drivers, address for leaders, key that leaders must know), or
the text of what is wrong. It ends with rank 0, or when that closes the connection.
"""

import asyncio
import dataclasses
import functools
import logging
import os
import socket
import sys
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from threading import Thread
from typing import Any

from megarl.child_process import parent
from megarl.environments.calls import FROM_LEADERS
from megarl.environments.sessions.app import build_app
from megarl.environments.sessions.registry import Registry
from megarl.flags.serving import Serving
from megarl.serving import links
from megarl.serving.listening import HttpServer, run_process

_TICK = 0.5  # seconds between two looks at sessions that may have expired
_NAMES = ("host", "port", "max_body_mb", "max_connections", "connection_timeout")

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class SessionsConfig:
    """What the process needs to know.

    Attributes:
        settings: values of the server's flags, of which host, port and limits of clients are read.
        api_keys: with which drivers take sessions; none: a loopback address, and any client of the machine may.
        seconds: for which a session may be without a request.
        record: file of the order of claims and ends; None: it is not written.
        goes_on: it is that of a run that is resumed.
        ranks_address: where leaders connect: the path of a Unix socket, or host and port (0: any).
    """

    settings: Serving
    api_keys: list[str]
    seconds: float
    record: Path | None
    goes_on: bool = False
    ranks_address: str | tuple[str, int] = ""


def sessions_config(settings: Any, api_keys: list[str]) -> SessionsConfig:
    """The configuration of these flags. `api_keys`: of `--api-key-file`."""
    server = Serving(**{name: getattr(settings, name) for name in _NAMES})
    record = Path(settings.save) / "sessions.jsonl" if settings.save else None
    return SessionsConfig(server, api_keys, settings.environment_timeout, record, goes_on=settings.load is not None)


async def _serve(
    config: SessionsConfig, rank_0: Connection, http: socket.socket, listener: Listener, key: bytes
) -> int:
    loop = asyncio.get_running_loop()
    registry, s = Registry(config.seconds, config.record, loop.time), config.settings

    def follow(connection: Connection):
        """Hands what comes on a leader's connection to the loop; the run ends without any of its leaders."""
        link = links.Link(connection, FROM_LEADERS)
        try:
            while True:
                for message in link.receive():
                    loop.call_soon_threadsafe(registry.receive, link, message)
        except (ConnectionError, RuntimeError):
            log.debug("a leader has closed its connection")

    Thread(target=links.accept_all, args=[listener, key, follow], daemon=True).start()
    app = build_app(registry, config.api_keys, s.host, int(s.max_body_mb * 2**20), s.connection_timeout)
    loop.add_reader(rank_0.fileno(), os._exit, 0)
    watcher = asyncio.create_task(registry.watch(_TICK))
    await HttpServer(app, s).serve(sockets=[http])
    watcher.cancel()
    return 0


def main() -> int:
    """Runs the process; returns its exit status."""
    rank_0 = parent()
    logging.basicConfig(level=logging.WARNING, format="megarl.sessions: %(levelname)s: %(message)s", stream=sys.stderr)

    def prepare(config: SessionsConfig):
        if config.record is not None and not config.goes_on:
            config.record.unlink(missing_ok=True)
        return functools.partial(_serve, config, rank_0)

    return run_process(rank_0, prepare)


if __name__ == "__main__":
    sys.exit(main())
