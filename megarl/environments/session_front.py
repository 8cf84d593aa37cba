"""The HTTP process of sessions, started by rank 0 (`listening.run_process`) with a `SessionsConfig`. Imports no torch.

A driver takes a session, asks the policy in it, and ends it with a reward. The process ends with rank 0, or when that
closes the connection.
"""

import asyncio
import dataclasses
import functools
import json
import os
import secrets
import socket
import sys
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Request, Response
from pydantic import Field

from megarl.child_process import parent
from megarl.environments.agents.dialect import error_response
from megarl.environments.agents.endpoint import application, given_key
from megarl.environments.agents.session import Session
from megarl.environments.calls import FROM_LEADERS, Answer, Ask, Asked, Close, Offer, Replied
from megarl.environments.protocol import ImageBytes, Observation
from megarl.errors import one_line
from megarl.flags.serving import Serving
from megarl.measurements import MAX_PARTS, MAX_VALUE, NamesOfRun, parts_of
from megarl.observe.files import json_bytes
from megarl.serving import links
from megarl.serving.error_answers import RequestError, add_error_handlers, invalid
from megarl.serving.listening import HttpServer, run_process
from megarl.serving.middleware import BEARER, NO_KEY, check_key, checked, one_length, same_origin, with_body
from megarl.serving.schemas import StrictModel

_ROOT = "/sessions"
MAX_ENDED = 1 << 14  # sessions whose ends are remembered, for errors that say so
_TICK = 0.5  # seconds between two looks at sessions that may have expired
_NAMES = ("host", "port", "max_body_mb", "max_connections", "connection_timeout")


@dataclasses.dataclass(frozen=True)
class SessionsConfig:
    """What the process needs to know. Without API keys any client of the machine may take sessions."""

    settings: Serving
    api_keys: list[str]
    seconds: float  # for which a session may be without a request
    record: Path | None  # file of the order of claims and ends
    goes_on: bool = False  # the run is resumed
    ranks_address: str | tuple[str, int] = ""  # a Unix socket's path, or host and port (0: any)


def sessions_config(settings: Any, api_keys: list[str]) -> SessionsConfig:
    """The configuration of these flags. `api_keys`: of `--api-key-file`."""
    server = Serving(**{name: getattr(settings, name) for name in _NAMES})
    record = Path(settings.save) / "sessions.jsonl" if settings.save else None
    return SessionsConfig(server, api_keys, settings.environment_timeout, record, goes_on=settings.load is not None)


# -- the sessions that wait for a driver, and those that have one -----------------------------------------------------

Place = tuple[Any, int]  # link of a leader, number of the episode there


@dataclasses.dataclass
class OpenSession:
    """An episode that a driver has."""

    name: str  # in paths
    place: Place
    offer: Offer
    session: Session

    @property
    def facts(self) -> dict[str, Any]:
        """Which episode it is: its group, its place in it, and whether it belongs to an evaluation."""
        group, _, sample = (self.offer.key or "").rpartition("/")
        return {"group": group or None, "sample": int(sample) if sample else None, "evaluation": self.offer.key is None}


class Registry:
    """Hands out episodes in the order in which they came, so the siblings of a group one after another."""

    def __init__(self, seconds: float, record: Path | None, time: Callable[[], float]):
        """`seconds`: for which a session may be without a request, and offers without any driver; `record`: file of the
        order of claims and ends.
        """
        self._seconds, self._record, self._time = seconds, record, time
        self.part_names = NamesOfRun()
        self._waiting: dict[Place, Offer] = {}
        self._open: dict[str, OpenSession] = {}
        self._names: dict[Place, str] = {}
        self._ended: deque[str] = deque(maxlen=MAX_ENDED)
        self._last_driver = time()  # when a driver has asked for anything

    # -- leaders -----------------------------------------------------------------------------------------------------

    def receive(self, link: Any, message: Offer | Close | Replied):
        """Takes a message of a leader."""
        place = link, message.number
        if isinstance(message, Offer):
            self._waiting[place] = message
            if len(self._waiting) == 1:
                self._last_driver = max(self._last_driver, self._time())  # nobody could take one before
        elif isinstance(message, Close):
            self._waiting.pop(place, None)
            if place in self._names:
                self._forget(self._open[self._names[place]])
        else:
            found = self._open.get(self._names.get(place, ""))
            if found is not None and found.offer.ticket == message.ticket:
                found.session.receive(message.request, message.reply)

    # -- drivers -----------------------------------------------------------------------------------------------------

    def claim(self) -> OpenSession:
        """RequestError 503 if no session waits."""
        self._last_driver = self._time()
        if not self._waiting:
            raise RequestError(503, "no session waits now", code="no_session", headers={"Retry-After": "1"})
        place = next(iter(self._waiting))
        offer, (link, number) = self._waiting.pop(place), place

        def send(request: int, ask: Ask, images: ImageBytes):
            link.send(Asked(number, offer.ticket, request, ask))

        session = Session(send, reads_images=False)
        session.shows_tokens = True
        name = secrets.token_hex(12)
        found = self._open[name] = OpenSession(name, place, offer, session)
        self._names[place] = name
        self._write("claimed", found)
        return found

    def get(self, name: str) -> OpenSession:
        """The session of a name. RequestError 404 for an unknown one, 409 for one that has ended."""
        self._last_driver = self._time()
        if name in self._open:
            return self._open[name]
        if name in self._ended:
            raise RequestError(409, "this session has ended", code="session_ended")
        raise RequestError(404, "there is no such session", code="unknown_session")

    def finish(self, found: OpenSession, end: Observation | None, failure: str | None = None):
        """Ends a session with its score, or with a failure."""
        _send_end(found.place, found.offer, end, True, found.session.worked_seconds, failure)
        self._write("failed" if end is None else "finished", found, reward=None if end is None else end.reward)
        self._forget(found)

    def _forget(self, found: OpenSession):
        del self._open[found.name], self._names[found.place]
        self._ended.append(found.name)
        found.session.close(RequestError(409, "this session has ended", code="session_ended"))

    # -- time --------------------------------------------------------------------------------------------------------

    def expire(self):
        """Ends sessions without requests, those that were refused too often, and offers if there is no driver."""
        now = self._time()
        for found in list(self._open.values()):
            if found.session.spent.is_set():
                self.finish(found, Observation(done=True, correct=False))
            elif found.session.idle_seconds > self._seconds:
                self.finish(found, None, f"its driver asked nothing for {self._seconds:g} s")
            elif found.session.idle_seconds == 0.0:  # the policy writes for a driver
                self._last_driver = now
        if self._waiting and now - self._last_driver > self._seconds:
            failure = f"no driver has asked for a session, or in one, for {self._seconds:g} s"
            for place, offer in self._waiting.items():
                _send_end(place, offer, None, False, 0.0, failure)
            self._waiting.clear()

    async def watch(self, tick: float):
        """Expires for ever."""
        while True:
            await asyncio.sleep(tick)
            self.expire()

    def _write(self, event: str, found: OpenSession, **more: Any):
        if self._record is None:
            return
        with open(self._record, "a", encoding="utf-8") as file:
            file.write(json.dumps({"event": event, "session": found.name, **found.facts, **more}) + "\n")


def _send_end(place: Place, offer: Offer, end: Observation | None, retry: bool, seconds: float, failure: str | None):
    """Tells a leader the end of an episode. `retry`: whether another driver may try."""
    link, number = place
    link.send(Answer(number, offer.ticket, end, [], retry, seconds, failure, is_agent=True))


# -- what drivers ask --------------------------------------------------------------------------------------------------


class FinishRequest(StrictModel):
    """The end of a session: its score, or why the driver has failed."""

    reward: Annotated[float, Field(ge=-MAX_VALUE, le=MAX_VALUE)] | None = None
    correct: bool | None = None
    parts: dict[str, float] | None = None  # under the rule of `measurements`
    failure: Annotated[str, Field(min_length=1, max_length=500)] | None = None


def build_app(registry: Registry, api_keys: Sequence[str], host: str, max_bytes: int, seconds: float) -> Any:
    """`api_keys`: as of `SessionsConfig`; `max_bytes`, `seconds`: of a request's body."""
    api = FastAPI(title="megarl sessions", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    add_error_handlers(api)

    @api.get("/health")
    async def health():
        return {"status": "ok"}

    @api.post(_ROOT)
    async def claim(body: StrictModel | None = None):  # a request for a session has no fields
        found = registry.claim()
        task = dataclasses.asdict(found.offer.task)
        del task["images"]  # no prompt has some
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

    own = checked(with_body(api, max_bytes, seconds), one_length)
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
    """Checks keys, and leads the paths of a session to the endpoint of agents, `policy`."""

    def led(scope: dict[str, Any]) -> Any:
        """The application, whose scope is filled in. RequestError for a wrong key, or a session that is not there."""
        head, _, rest = scope["path"].removeprefix(_ROOT + "/").partition("/")
        key = given_key(scope["headers"])
        if not scope["path"].startswith(_ROOT + "/") or not rest:
            if scope["path"] == _ROOT and api_keys:
                check_key(key, api_keys, NO_KEY, BEARER)
            return own
        found = registry.get(head)
        check_key(key, [found.session.key.encode()], "the key is not that of this session", BEARER)
        if not rest.startswith("v1/"):
            scope["open_session"] = found
            return own
        scope |= {"path": f"/{rest}", "raw_path": f"/{rest}".encode(), "session": found.session}
        return policy

    return checked(own, led, error_response)


# -- the process -------------------------------------------------------------------------------------------------------


async def _serve(
    config: SessionsConfig, rank_0: Connection, http: socket.socket, listener: Listener, key: bytes
) -> int:
    loop = asyncio.get_running_loop()
    registry, s = Registry(config.seconds, config.record, loop.time), config.settings

    def received(link: links.Link, came: list[Any] | ConnectionError):
        """Takes what a leader says; the run ends without any of its leaders."""
        for message in () if isinstance(came, ConnectionError) else came:
            registry.receive(link, message)

    links.follow_all(listener, key, FROM_LEADERS, received)
    app = build_app(registry, config.api_keys, s.host, int(s.max_body_mb * 2**20), s.connection_timeout)
    loop.add_reader(rank_0.fileno(), os._exit, 0)
    watcher = asyncio.create_task(registry.watch(_TICK))
    await HttpServer(app, s).serve(sockets=[http])
    watcher.cancel()
    return 0


def main() -> int:
    """Runs the process; returns its exit status."""
    rank_0 = parent()

    def prepare(config: SessionsConfig):
        if config.record is not None and not config.goes_on:
            config.record.unlink(missing_ok=True)
        return functools.partial(_serve, config, rank_0)

    return run_process(rank_0, "megarl.sessions", prepare)


if __name__ == "__main__":
    sys.exit(main())
