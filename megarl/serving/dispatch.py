"""Dispatches requests to replicas: one queue, at most `max_requests` at each replica, and what their leaders answer."""

import asyncio
import collections
import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from megarl.serving.errors import RequestError, invalid, overloaded, unavailable
from megarl.serving.metrics import ServerMetrics
from megarl.serving.routing import ReplicaRouter
from megarl.serving.wire import Frame, FrontendLink

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class News:
    """What a leader says about one request.

    Attributes:
        kind: "tokens", "scores", "routes" or "error".
        tokens, logprobs, top, finish: see `megarl.serving.wire`; of scores `logprobs` and `top`.
        version: of the policy that generated the tokens.
        label: of its weights.
        routes: (shape, base64 data).
        error: the error that ends the request.
    """

    kind: str
    tokens: Sequence[int] = ()
    logprobs: Sequence[float | None] = ()
    top: Sequence[Any] | None = None
    finish: str | None = None
    version: int = 0
    label: str = ""
    routes: dict[str, Any] | None = None
    error: RequestError | None = None

    @property
    def is_last(self) -> bool:
        """Whether nothing follows for this request."""
        return self.finish is not None or self.kind in ("scores", "error")


Deliver = Callable[[int, News], None]


@dataclass
class LeaderRequest:
    """One request to a leader: its frame, and where its news go."""

    frame: Frame
    session: str | None
    deliver: Deliver
    replica: "ReplicaState | None" = None

    @property
    def prompt(self) -> Sequence[int]:
        """The tokens that the replica reads."""
        return self.frame.get("prompt") or self.frame.get("tokens", ())


@dataclass
class ReplicaState:
    """What the frontend knows about one replica."""

    number: int
    link: FrontendLink
    max_requests: int
    capacity: int
    version: int
    label: str
    is_open: bool = True
    outstanding: dict[int, LeaderRequest] = field(default_factory=dict)


class Dispatcher:
    """All replicas and all their requests."""

    def __init__(self, replicas: int, max_queue: int, metrics: ServerMetrics):
        self.expected, self.max_queue, self.metrics = replicas, max_queue, metrics
        self.replicas: dict[int, ReplicaState] = {}
        self.is_draining = False
        self.is_paused = False
        self.lost: str | None = None  # why no request can run any more
        self._ids = itertools.count(1)
        self._control_numbers = itertools.count(1)
        self._waiting: collections.OrderedDict[int, LeaderRequest] = collections.OrderedDict()
        self._router = ReplicaRouter()
        self._controls: dict[int, tuple[set[int], list[str], asyncio.Future]] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    # -- state ---------------------------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        """Whether all leaders have connected and new requests are welcome."""
        return len(self.replicas) == self.expected and not self.is_draining and self.lost is None

    @property
    def capacity(self) -> int | None:
        """Tokens that a request may have on every replica; None before there is one."""
        return min((replica.capacity for replica in self.replicas.values()), default=None)

    def add(self, link: FrontendLink, ready: Frame) -> ReplicaState:
        """Takes a leader in, after its "ready"; ConnectionError if the frame is wrong or the replica has a leader."""
        try:
            number = ready["replica"]
            if ready["type"] != "ready" or number in self.replicas or not 0 <= number < self.expected:
                raise ConnectionError("a leader began with a wrong frame")
            values = (ready[name] for name in ("max_requests", "capacity", "version", "label"))
            replica = ReplicaState(number, link, *values)
        except (KeyError, TypeError):
            raise ConnectionError("a leader began with a malformed frame") from None
        self.replicas[number] = replica
        self._observe(replica, ready)
        return replica

    def check_accepting(self):
        """RequestError 503 if no new request is accepted at all."""
        if self.lost is not None:
            raise unavailable(self.lost)
        if self.is_draining:
            raise unavailable("the server is shutting down")
        if not self.is_ready:
            raise unavailable("the server is starting")

    # -- requests ------------------------------------------------------------------------------------------------

    def submit(self, frames: Sequence[Frame], session: str | None, deliver: Deliver) -> list[int]:
        """Queues requests and returns their ids; `deliver(id, news)` is called for each news, the last one included.

        RequestError if they are more than ever fit (400), the queue is full (429), or nothing can run now (503).
        """
        self.check_accepting()
        slots = sum(replica.max_requests for replica in self.replicas.values())
        free = slots - sum(len(replica.outstanding) for replica in self.replicas.values())
        if len(frames) > slots + self.max_queue:
            raise invalid(f"{len(frames)} prompts and choices: at most {slots + self.max_queue} can be queued")
        if len(self._waiting) + len(frames) > self.max_queue + free:
            if self.is_paused or not all(replica.is_open for replica in self.replicas.values()):
                raise unavailable("generation is paused, and the queue is full")
            raise overloaded("the queue is full")
        ids = [next(self._ids) for _ in frames]
        for number, frame in zip(ids, frames, strict=True):
            self._waiting[number] = LeaderRequest({**frame, "id": number}, session, deliver)
        self._dispatch()
        return ids

    def abort(self, ids: Sequence[int]):
        """Ends requests; nothing more is delivered for them. Unknown ids are ignored."""
        told: dict[int, list[int]] = {}
        for number in ids:
            if self._waiting.pop(number, None) is None:
                for replica in self.replicas.values():
                    if replica.outstanding.pop(number, None) is not None:
                        told.setdefault(replica.number, []).append(number)
        for number, aborted in told.items():
            self.replicas[number].link.send({"type": "abort", "ids": aborted})
        self._dispatch()

    def fail(self, reason: str):
        """Ends every request with 503, and accepts none any more."""
        self.lost = self.lost or reason
        requests = list(self._waiting.items())
        self._waiting.clear()
        for replica in self.replicas.values():
            requests += replica.outstanding.items()
            replica.outstanding.clear()
        for number, request in requests:
            request.deliver(number, News("error", error=unavailable(reason)))
        for _, _, done in self._controls.values():
            if not done.done():
                done.set_exception(unavailable(reason))
        self._update()

    async def idle(self):
        """Waits until no request runs or waits."""
        await self._idle.wait()

    def _dispatch(self):
        while self._waiting:
            room = {
                replica.number: len(replica.outstanding)
                for replica in self.replicas.values()
                if len(replica.outstanding) < replica.max_requests
            }
            if not room:
                break
            number, request = self._waiting.popitem(last=False)
            replica = self.replicas[self._router.choose(request.prompt, request.session, room)]
            replica.outstanding[number] = request
            replica.link.send(request.frame)
        self._update()

    def _update(self):
        """The gauges, and whether the dispatcher is idle."""
        self.metrics.waiting.set(len(self._waiting))
        is_idle = not self._waiting
        for replica in self.replicas.values():
            self.metrics.running.labels(replica.number).set(len(replica.outstanding))
            is_idle = is_idle and not replica.outstanding
        self._idle.set() if is_idle else self._idle.clear()

    # -- control -------------------------------------------------------------------------------------------------

    async def control(self, command: str, **fields: Any):
        """Sends a control command to all leaders and waits for their answers; RequestError 400 with the first error."""
        self.check_accepting()
        number = next(self._control_numbers)
        done = asyncio.get_running_loop().create_future()
        errors: list[str] = []
        self._controls[number] = (set(self.replicas), errors, done)
        if command in ("pause", "resume"):
            self.is_paused = command == "pause"
        for replica in self.replicas.values():
            replica.link.send({"type": "control", "number": number, "command": command, **fields})
        try:
            await done
        finally:
            del self._controls[number]
        if command == "weights":
            self._router.forget()
        if errors:
            raise invalid(errors[0], code="control_failed")

    def stop(self):
        """Tells all leaders to end."""
        for replica in self.replicas.values():
            replica.link.send({"type": "stop"})

    # -- what leaders say ----------------------------------------------------------------------------------------

    def receive(self, replica: ReplicaState, frame: Frame):
        """Takes one frame of a leader in; ConnectionError for one that is malformed. "drain" is not handled here."""
        try:
            kind = frame["type"]
            if kind == "tokens":
                self._tokens(replica, frame)
            elif kind == "scores":
                fields = {name: frame[name] for name in ("logprobs", "top", "version")}
                self._finish(replica, frame["id"], News("scores", label=replica.label, **fields))
            elif kind == "routes" and frame["id"] in replica.outstanding:
                routes = {name: frame[name] for name in ("shape", "data")}
                replica.outstanding[frame["id"]].deliver(frame["id"], News("routes", routes=routes))
            elif kind == "refused":
                self._finish(replica, frame["id"], News("error", error=invalid(str(frame["message"]))))
            elif kind == "control":
                self._answer(replica, frame)
            elif kind == "window":
                replica.is_open, replica.label = bool(frame["open"]), frame.get("label", replica.label)
                self._observe(replica, frame)
        except (KeyError, TypeError, ValueError):
            raise ConnectionError(f"replica {replica.number} sent a malformed frame") from None

    def _tokens(self, replica: ReplicaState, frame: Frame):
        self._observe(replica, frame)
        for number, tokens, logprobs, top, finish in frame["events"]:
            request = replica.outstanding.get(number)
            if request is None:
                continue  # aborted while this was on its way
            news = News("tokens", tokens, logprobs, top, finish, replica.version, replica.label)
            if finish is not None:
                del replica.outstanding[number]
            request.deliver(number, news)
        self._dispatch()

    def _finish(self, replica: ReplicaState, number: int, news: News):
        request = replica.outstanding.pop(number, None)
        if request is not None:
            request.deliver(number, news)
        self._dispatch()

    def _answer(self, replica: ReplicaState, frame: Frame):
        replica.label = frame.get("label", replica.label)
        self._observe(replica, frame)
        if frame["number"] not in self._controls:
            return
        missing, errors, done = self._controls[frame["number"]]
        missing.discard(replica.number)
        if frame.get("error"):
            errors.append(str(frame["error"]))
        if not missing and not done.done():
            done.set_result(None)

    def _observe(self, replica: ReplicaState, frame: Frame):
        replica.version = frame.get("version", replica.version)
        self.metrics.version.labels(replica.number).set(replica.version)
        if "blocks" in frame:
            self.metrics.free_blocks.labels(replica.number).set(frame["blocks"])
