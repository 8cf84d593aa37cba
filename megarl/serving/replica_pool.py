"""Gives requests to replicas, at most `max_requests` to each, and hands on what their leaders answer."""

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megarl.serving.errors import RequestError, invalid, timed_out, unavailable
from megarl.serving.fair_queue import FairQueue
from megarl.serving.links import Link, Message
from megarl.serving.metrics import ServerMetrics
from megarl.serving.routing import ReplicaRouter


@dataclass(frozen=True)
class RequestUpdate:
    """What a leader says about one request.

    Attributes:
        kind: "tokens", "scores", "routes" or "error".
        tokens, logprobs, top, finish: see `megarl.serving.links`; of scores `logprobs` and `top`.
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


@dataclass
class LeaderRequest:
    """One request to a leader."""

    message: Message
    session: str | None
    updates: asyncio.Queue[tuple[int, RequestUpdate]]  # with the request's id

    def update(self, update: RequestUpdate):
        """Hands on what the leader says."""
        self.updates.put_nowait((self.message["id"], update))


@dataclass
class ReplicaState:
    """What the frontend knows about one replica."""

    number: int
    link: Link
    max_requests: int
    capacity: int
    version: int
    label: str
    is_open: bool = True
    outstanding: dict[int, LeaderRequest] = field(default_factory=dict)


@dataclass
class _Control:
    """A command that not all replicas have answered."""

    missing: set[int]  # replicas
    done: asyncio.Future
    errors: list[str] = field(default_factory=list)


class ReplicaPool:
    """All replicas and all their requests."""

    def __init__(self, replicas: int, max_queue: int, seconds: float, metrics: ServerMetrics):
        """`seconds`: that a request or a command may take."""
        self.expected, self.max_queue, self.seconds, self.metrics = replicas, max_queue, seconds, metrics
        self.replicas: dict[int, ReplicaState] = {}
        self.is_draining = False
        self.is_paused = False
        self.lost: str | None = None  # why no request can run any more
        self._ids = itertools.count(1)
        self._control_numbers = itertools.count(1)
        self._waiting: FairQueue[LeaderRequest] = FairQueue()
        self._router = ReplicaRouter()
        self._controls: dict[int, _Control] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    # -- state ---------------------------------------------------------------------------------------------------

    @property
    def capacity(self) -> int | None:
        """Tokens that a request may have on every replica; None before there is one."""
        return min((replica.capacity for replica in self.replicas.values()), default=None)

    @property
    def weights(self) -> dict[str, Any]:
        """Policy version and label of the first replica's weights; empty before it has connected."""
        first = self.replicas.get(0)
        return {"version": first.version, "label": first.label} if first else {}

    def add(self, link: Link, ready: Message) -> ReplicaState:
        """Takes a leader in, after its "ready"; ConnectionError if that is wrong or the replica has a leader."""
        try:
            number = ready["replica"]
            if ready["type"] != "ready" or number in self.replicas or not 0 <= number < self.expected:
                raise ConnectionError("a leader began with a wrong message")
            fields = {name: ready[name] for name in ("max_requests", "capacity", "version", "label")}
            replica = ReplicaState(number, link, **fields)
        except (KeyError, TypeError):
            raise ConnectionError("a leader began with a malformed message") from None
        self.replicas[number] = replica
        self._observe(replica, ready)
        return replica

    def check_accepting(self):
        """RequestError 503 if no new request is accepted at all."""
        if self.lost is not None:
            raise unavailable(self.lost)
        if self.is_draining:
            raise unavailable("the server is shutting down")
        if len(self.replicas) < self.expected:
            raise unavailable("the server is starting")

    # -- requests ------------------------------------------------------------------------------------------------

    def check_room(self, count: int):
        """RequestError for so many requests if they are more than ever fit (400), or have no place now (429, 503)."""
        self.check_accepting()
        slots = sum(replica.max_requests for replica in self.replicas.values())
        free = slots - sum(len(replica.outstanding) for replica in self.replicas.values())
        if count > slots + self.max_queue:
            raise invalid(f"{count} prompts and choices: at most {slots + self.max_queue} can be queued")
        if len(self._waiting) + count > self.max_queue + free:
            if self.is_paused or not all(replica.is_open for replica in self.replicas.values()):
                raise unavailable("generation is paused, and the queue is full")
            raise RequestError(429, "the queue is full", code="queue_full", headers={"Retry-After": "1"})

    def submit(self, messages: Sequence[Message], session: str | None, updates: asyncio.Queue) -> list[int]:
        """Queues requests and returns their ids; (id, RequestUpdate) are put into `updates`.

        RequestError if they have no place (`check_room`).
        """
        self.check_room(len(messages))
        ids = [next(self._ids) for _ in messages]
        for number, message in zip(ids, messages, strict=True):
            self._waiting.add(number, LeaderRequest({**message, "id": number}, session, updates))
        self._assign()
        return ids

    def abort(self, ids: Sequence[int]):
        """Ends requests; no update of them follows. Unknown ids are ignored."""
        for number in ids:
            self._waiting.discard(number)
        for replica in self.replicas.values():
            aborted = [number for number in ids if replica.outstanding.pop(number, None)]
            if aborted:
                replica.link.send({"type": "abort", "ids": aborted})
        self._assign()

    def fail(self, reason: str):
        """Ends every request with 503, and accepts none any more."""
        self.lost = self.lost or reason
        requests = [self._waiting.pop()[1] for _ in range(len(self._waiting))]
        for replica in self.replicas.values():
            requests += replica.outstanding.values()
            replica.outstanding.clear()
        for request in requests:
            request.update(RequestUpdate("error", error=unavailable(reason)))
        for control in self._controls.values():
            if not control.done.done():
                control.done.set_exception(unavailable(reason))
        self._note_load()

    async def idle(self):
        """Waits until no request runs or waits."""
        await self._idle.wait()

    def _assign(self):
        while self._waiting:
            room = {
                replica.number: len(replica.outstanding)
                for replica in self.replicas.values()
                if len(replica.outstanding) < replica.max_requests
            }
            if not room:
                break
            number, request = self._waiting.pop()
            prompt = request.message.get("prompt") or request.message.get("tokens", ())
            replica = self.replicas[self._router.choose(prompt, request.session, room)]
            replica.outstanding[number] = request
            replica.link.send(request.message)
        self._note_load()

    def _note_load(self):
        """Sets the gauges, and whether the pool is idle."""
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
        control = _Control(set(self.replicas), asyncio.get_running_loop().create_future())
        self._controls[number] = control
        if command in ("pause", "resume"):
            self.is_paused = command == "pause"
        self._send_all({"type": "control", "number": number, "command": command, **fields})
        try:
            async with asyncio.timeout(self.seconds):
                await control.done
        except TimeoutError:
            raise timed_out(self.seconds) from None
        finally:
            del self._controls[number]
        if command == "weights":
            self._router.forget()
        if control.errors:
            raise invalid(control.errors[0], code="control_failed")

    def stop(self):
        self._send_all({"type": "stop"})

    def _send_all(self, message: Message):
        for replica in self.replicas.values():
            replica.link.send(message)

    # -- what leaders say ----------------------------------------------------------------------------------------

    def receive(self, replica: ReplicaState, message: Message):
        """Takes one message of a leader in; ConnectionError for a malformed one. "drain" is not handled here."""
        try:
            kind = message["type"]
            if kind == "tokens":
                self._observe(replica, message)
                for number, tokens, logprobs, top, finish in message["events"]:
                    update = RequestUpdate(kind, tokens, logprobs, top, finish, replica.version, replica.label)
                    self._hand_on(replica, number, update)
            elif kind == "scores":
                fields = {name: message[name] for name in ("logprobs", "top", "version")}
                self._hand_on(replica, message["id"], RequestUpdate(kind, label=replica.label, **fields))
            elif kind == "routes":
                routes = {name: message[name] for name in ("shape", "data")}
                self._hand_on(replica, message["id"], RequestUpdate(kind, routes=routes))
            elif kind == "refused":
                self._hand_on(replica, message["id"], RequestUpdate("error", error=invalid(str(message["message"]))))
            elif kind == "control":
                self._receive_answer(replica, message)
            elif kind == "window":
                replica.is_open, replica.label = bool(message["open"]), message.get("label", replica.label)
                self._observe(replica, message)
        except (KeyError, TypeError, ValueError):
            raise ConnectionError("it sent a malformed message") from None
        self._assign()

    def _hand_on(self, replica: ReplicaState, number: int, update: RequestUpdate):
        """Hands on what the leader says about a request, unless it was aborted meanwhile."""
        take = replica.outstanding.pop if update.is_last else replica.outstanding.get
        if request := take(number, None):
            request.update(update)

    def _receive_answer(self, replica: ReplicaState, message: Message):
        replica.label = message.get("label", replica.label)
        self._observe(replica, message)
        control = self._controls.get(message["number"])
        if control is None:
            return
        control.missing.discard(replica.number)
        if message.get("error"):
            control.errors.append(str(message["error"]))
        if not control.missing and not control.done.done():
            control.done.set_result(None)

    def _observe(self, replica: ReplicaState, message: Message):
        replica.version = message.get("version", replica.version)
        self.metrics.version.labels(replica.number).set(replica.version)
        if "blocks" in message:
            self.metrics.free_blocks.labels(replica.number).set(message["blocks"])
