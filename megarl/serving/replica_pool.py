"""Gives requests to replicas, at most `max_requests` to each, and hands on what their leaders answer."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from megarl.serving import replica_messages as messages
from megarl.serving.error_answers import RequestError, invalid, timed_out, unavailable
from megarl.serving.links import Link
from megarl.serving.middleware import ServerMetrics
from megarl.serving.replica_routing import FairQueue, ReplicaRouter


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
    outstanding: dict[int, "Submission"] = field(default_factory=dict)  # by id of the request


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
        self._waiting: FairQueue[tuple[messages.Request, Submission]] = FairQueue()
        self._router = ReplicaRouter()
        # Answers to the commands that run, by their number and the replica: what is wrong, or None.
        self._controls: dict[int, dict[int, asyncio.Future[str | None]]] = {}
        self.idle = asyncio.Event()  # set while no request runs or waits
        self.idle.set()

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

    def add(self, link: Link, ready: messages.ToFrontend) -> ReplicaState:
        """Takes a leader in, after its `Ready`; ConnectionError if that is wrong or the replica has a leader."""
        missing = set(range(self.expected)) - self.replicas.keys()
        if not isinstance(ready, messages.Ready) or ready.replica not in missing:
            raise ConnectionError("a leader began with a wrong message")
        replica = ReplicaState(ready.replica, link, ready.max_requests, ready.capacity, ready.version, ready.label)
        self.replicas[replica.number] = replica
        self._observe(replica, ready.version, ready.blocks)
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

    def submit(self, submission: "Submission") -> list[int]:
        """Queues the requests of a submission, and returns their ids. RequestError if they have no place."""
        self.check_room(len(submission.requests))
        ids = [next(self._ids) for _ in submission.requests]
        for number, request in zip(ids, submission.requests, strict=True):
            self._waiting.add(number, (request._replace(id=number), submission))
        self._assign()
        return ids

    def abort(self, ids: Sequence[int]):
        """Ends requests; no update of them follows. Unknown ids are ignored."""
        for number in ids:
            self._waiting.discard(number)
        for replica in self.replicas.values():
            aborted = [number for number in ids if replica.outstanding.pop(number, None)]
            if aborted:
                replica.link.send(messages.Abort(aborted))
        self._assign()

    def fail(self, reason: str):
        """Ends every request with 503, and accepts none any more."""
        self.lost = self.lost or reason
        failed = [self._waiting.pop()[1][1] for _ in range(len(self._waiting))]
        for replica in self.replicas.values():
            failed += replica.outstanding.values()
            replica.outstanding.clear()
        for submission in failed:
            submission.take(unavailable(reason))
        for answer in (answer for answers in self._controls.values() for answer in answers.values()):
            if not answer.done():
                answer.set_exception(unavailable(reason))
        self._note_load()

    def _assign(self):
        while self._waiting:
            open_ones = [each for each in self.replicas.values() if len(each.outstanding) < each.max_requests]
            room = {each.number: len(each.outstanding) for each in open_ones}
            if not room:
                break
            number, (request, submission) = self._waiting.pop()
            replica = self.replicas[self._router.choose(request.prompt, submission.session, room)]
            replica.outstanding[number] = submission
            replica.link.send(request)
        self._note_load()

    def _note_load(self):
        self.metrics.waiting.set(len(self._waiting))
        is_idle = not self._waiting
        for replica in self.replicas.values():
            self.metrics.running.labels(replica.number).set(len(replica.outstanding))
            is_idle = is_idle and not replica.outstanding
        self.idle.set() if is_idle else self.idle.clear()

    # -- control -------------------------------------------------------------------------------------------------

    async def control(self, command: str, **fields: str):
        """Sends a control command to all leaders and waits for their answers; RequestError 400 with the first error."""
        self.check_accepting()
        number = next(self._control_numbers)
        loop = asyncio.get_running_loop()
        answers = self._controls[number] = {replica: loop.create_future() for replica in self.replicas}
        if command in ("pause", "resume"):
            self.is_paused = command == "pause"
        self._send_all(messages.Control(command, number, **fields))
        try:
            async with asyncio.timeout(self.seconds):
                errors = await asyncio.gather(*answers.values())
        except TimeoutError:
            raise timed_out(self.seconds) from None
        finally:
            del self._controls[number]
        if command == "weights":
            self._router.forget()
        if problem := next(filter(None, errors), None):
            raise invalid(problem, code="control_failed")

    def stop(self):
        self._send_all(messages.Control("stop"))

    def _send_all(self, message: messages.Control):
        for replica in self.replicas.values():
            replica.link.send(message)

    # -- what leaders say ----------------------------------------------------------------------------------------

    def receive(self, replica: ReplicaState, message: messages.ToFrontend):
        """Takes one message of a leader in; ConnectionError for a malformed one. `Drain` is not handled here."""
        if isinstance(message, messages.Report):
            replica.is_open, replica.label = message.is_open, message.label
            self._observe(replica, message.version, message.blocks)
            for each in message.updates:
                self._hand_on(replica, each)
            answers = {} if message.command is None else self._controls.get(message.command, {})
            answer = answers.get(replica.number)
            if answer is not None and not answer.done():
                answer.set_result(message.error)
        self._assign()

    def _hand_on(self, replica: ReplicaState, fields: Sequence[Any]):
        """Hands on the fields of a `RequestUpdate`, unless its request was aborted meanwhile."""
        try:
            update = messages.RequestUpdate._make(fields)._replace(version=replica.version, label=replica.label)
        except TypeError:
            raise ConnectionError("it sent a malformed message") from None
        take = replica.outstanding.pop if update.is_last else replica.outstanding.get
        if submission := take(update.id, None):
            submission.take(update if update.error is None else invalid(update.error))

    def _observe(self, replica: ReplicaState, version: int, blocks: int):
        replica.version = version
        self.metrics.version.labels(replica.number).set(version)
        self.metrics.free_blocks.labels(replica.number).set(blocks)


class Submission:
    """One HTTP request's requests to replicas, as a context: leaving it ends those that still run.

    Updates that a slow consumer has not taken wait here.
    """

    def __init__(self, pool: ReplicaPool, requests: Sequence[messages.Request], session: str | None):
        self.requests, self.session, self._pool = requests, session, pool
        self._came: asyncio.Queue[messages.RequestUpdate | RequestError] = asyncio.Queue()
        self._indices: dict[int, int] = {}  # id -> index of the request, of those that have not finished
        self._last: dict[int, float] = {}  # id -> when its last tokens came
        self._start = time.monotonic()
        self._deadline = asyncio.get_running_loop().time() + pool.seconds

    def __enter__(self) -> "Submission":
        self._indices = {number: index for index, number in enumerate(self._pool.submit(self))}
        prompts = (len(request.prompt) for request in self.requests if isinstance(request, messages.Generate))
        self._pool.metrics.prompt_tokens.inc(sum(prompts))
        return self

    def __exit__(self, *_):
        self._pool.abort(list(self._indices))
        self._indices.clear()

    def take(self, came: messages.RequestUpdate | RequestError):
        """Takes what a leader says about a request, or why one fails."""
        self._came.put_nowait(came)

    def end(self, index: int):
        """Ends one request early, that with this index."""
        ended = [number for number, each in self._indices.items() if each == index]
        self._pool.abort(ended)
        for number in ended:
            del self._indices[number]

    async def updates(self) -> AsyncIterator[tuple[int, messages.RequestUpdate]]:
        """(index of the request, update), in the order of their arrival. RequestError if one fails, or time is up."""
        while self._indices:
            try:
                async with asyncio.timeout_at(self._deadline):
                    came = await self._came.get()
            except TimeoutError:
                raise timed_out(self._pool.seconds) from None
            if isinstance(came, RequestError):
                raise came
            index = self._indices.get(came.id)
            if index is None:
                continue
            if came.is_last:
                del self._indices[came.id]
            if came.tokens:
                self._measure(came.id, len(came.tokens))
            yield index, came

    def _measure(self, number: int, tokens: int):
        metrics, now = self._pool.metrics, time.monotonic()
        metrics.generated_tokens.inc(tokens)
        if number in self._last:
            metrics.between_tokens.observe((now - self._last[number]) / tokens)
        else:
            metrics.first_token.observe(now - self._start)
        self._last[number] = now
