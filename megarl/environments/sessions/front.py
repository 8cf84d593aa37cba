"""The HTTP process of sessions, started by rank 0: `python -m megarl.environments.sessions.front FD`. Imports no torch.

A driver takes a session, asks the policy in it, and ends it with a reward.

Rank 0 sends the process a `SessionsConfig`. The answer is (URL for drivers, address for leaders, key that leaders must
know), or the text of what is wrong. It ends with rank 0, or when that closes the connection.
"""

import asyncio
import dataclasses
import functools
import hmac
import logging
import os
import socket
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from threading import Thread
from typing import Annotated, Any

from fastapi import FastAPI, Request, Response
from pydantic import Field

from megarl.child_process import parent
from megarl.environments.agents.endpoint import application, error_response, given_key
from megarl.environments.calls import FROM_LEADERS
from megarl.environments.protocol import Observation
from megarl.environments.sessions.registry import OpenSession, Registry
from megarl.errors import one_line
from megarl.flags.serving import Serving
from megarl.measurements import MAX_PARTS, MAX_VALUE, parts_of
from megarl.observe.files import json_bytes
from megarl.serving import links
from megarl.serving.errors import RequestError, add_error_handlers, invalid
from megarl.serving.listening import HttpServer, run_process
from megarl.serving.middleware import BodyAndDisconnect, checked, one_length, same_origin
from megarl.serving.schemas import StrictModel

_ROOT = "/sessions"
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


# -- what drivers ask --------------------------------------------------------------------------------------------------


class FinishRequest(StrictModel):
    """The end of a session: its score, or why the driver has failed."""

    reward: Annotated[float, Field(ge=-MAX_VALUE, le=MAX_VALUE)] | None = None
    correct: bool | None = None
    parts: dict[str, float] | None = None  # under the rule of `measurements`
    failure: Annotated[str, Field(min_length=1, max_length=500)] | None = None


def build_app(registry: Registry, api_keys: Sequence[str], host: str, max_bytes: int, seconds: float) -> Any:
    """The ASGI application.

    Args:
        api_keys: with which drivers take sessions; none: any client of this machine may.
        host: that the server listens on.
        max_bytes, seconds: of a request's body.
    """
    api = FastAPI(title="megarl sessions", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    add_error_handlers(api)

    @api.get("/health")
    async def health():
        return {"status": "ok"}

    @api.post(_ROOT)
    async def claim(body: StrictModel | None = None):  # a request for a session has no fields
        found = registry.claim()
        task = dataclasses.asdict(found.offer.task)
        given = {"id": found.name, "key": found.session.key, "path": f"{_ROOT}/{found.name}/v1", "task": task}
        given |= found.facts
        return Response(json_bytes(given), media_type="application/json")  # metadata may be what JSON lacks

    @api.post(_ROOT + "/{name}/finish")
    async def finish(body: FinishRequest, request: Request):
        found: OpenSession = request.scope["open_session"]
        registry.get(found.name)  # another request may have ended it meanwhile
        if (body.reward is None) == (body.failure is None):
            raise invalid("an end has either a reward or a failure", "reward")
        if body.reward is None:
            registry.finish(found, None, f"its driver says: {one_line(body.failure)}")
        else:
            score = Observation([], float(body.reward), True, body.correct, _parts(body.parts or {}, registry))
            registry.finish(found, score)
        return {"id": found.name, "status": "ended"}

    own = checked(BodyAndDisconnect(api, max_bytes, seconds), one_length)
    app = _leads(registry, own, application(max_bytes, seconds), list(map(str.encode, api_keys)))
    return app if api_keys else checked(app, same_origin(host))


def _parts(given: dict[str, float], registry: Registry) -> dict[str, float]:
    """The parts of a score. RequestError 400 for one that may not be a metric, or is one too many for the run."""
    try:
        parts = parts_of(given)
    except ValueError as error:
        raise invalid(str(error), "parts") from None
    if beyond := registry.part_names.beyond(parts):
        raise invalid(f"the run has {MAX_PARTS} names of parts already; one more is {beyond[0]!r}", "parts")
    registry.part_names.add(parts)
    return parts


def _leads(registry: Registry, own: Any, policy: Any, api_keys: list[bytes]) -> Any:
    """Checks keys, and leads the paths of a session to the endpoint of agents.

    `own`: answers the paths of sessions; `policy`: those of a session's policy.
    """

    def led(scope: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """(application, its scope). RequestError for a wrong key, or a session that is not there."""
        head, _, rest = scope["path"].removeprefix(_ROOT + "/").partition("/")
        if not scope["path"].startswith(_ROOT + "/") or not rest:
            if scope["path"] == _ROOT and api_keys:
                _check_key(scope, api_keys, "a valid API key is needed: Authorization: Bearer KEY")
            return own, scope
        found = registry.get(head)
        _check_key(scope, [found.session.key.encode()], "the key is not that of this session")
        if rest.startswith("v1/"):
            path = f"/{rest}"
            return policy, {**scope, "path": path, "raw_path": path.encode(), "session": found.session}
        return own, {**scope, "open_session": found}

    async def answer(scope, receive, send):
        """The ASGI application."""
        if scope["type"] != "http":
            return None
        try:
            app, scope = led(scope)
        except RequestError as error:
            return await error_response(error, scope["path"])(scope, receive, send)
        return await app(scope, receive, send)

    return answer


def _check_key(scope: dict[str, Any], keys: list[bytes], problem: str):
    given, is_right = given_key(scope["headers"]), False
    for key in keys:
        is_right |= hmac.compare_digest(given, key)
    if not is_right:
        raise RequestError(401, problem, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


# -- the process -------------------------------------------------------------------------------------------------------


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
