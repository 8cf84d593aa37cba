"""Rounds in which the weights may change: by the clock, which is recorded, or as a schedule says.

Every `POLL_STEPS` engine steps a replica looks whether the actor has sent the next weights. If so, it leaves the
engine, takes them, and continues its responses: what they have is read again as part of their prompts, so the cache is
computed with the new weights. A response's tokens depend on the weights of each token, never on when or where.
"""

import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from megarl.arguments import Settings
from megarl.comm.early_responses import ResponseSender
from megarl.comm.role_mesh import RoleGroups
from megarl.errors import UsageError
from megarl.mcore import device
from megarl.mcore.inference.engine import RequestList, RequestSource, RolloutEngine
from megarl.mcore.inference.generation import Completion, GenerationRequest
from megarl.mcore.inference.response import Response
from megarl.rollout.request_queue import FirstGroups, SharedRequestQueue
from megarl.rollout.requests import RoundRequests, unknown_routes
from megarl.rollout.schedule import RoundRecord, Schedule, Segments, bounds
from megarl.rollout.weight_sync import WeightSync

_GO_ON, _TAKE_WEIGHTS, _STOP = 0, 1, 2  # what a replica does after a look

# Runs the engine; its arguments are `max_requests`, the requests, and `interrupt`, as of `RolloutEngine.stream`.
Stream = Callable[[int | None, RequestSource, Callable[[], int] | None], Iterator[tuple[int, Completion]]]
# Opens the source of a round's requests, of whole groups or not, and says whether the replicas share it.
OpenSource = Callable[[bool], tuple[RequestSource, SharedRequestQueue | None]]


class HeldWeights:
    """The step whose weights this rank of the rollout holds, and what is known of later steps."""

    def __init__(self, sync: WeightSync):
        self.sync, self.step = sync, 0
        self._has_trained: dict[int, bool] = {}  # of later steps; one without a batch sends no weights

    def end_step(self, step: int, has_trained: bool):
        """Notes whether a step changes the weights."""
        self._has_trained[step] = has_trained

    def skip_unchanged(self, newest: int):
        """Goes on to the last of the next steps, up to `newest`, whose weights are the same."""
        while self.step < newest and not self._has_trained.get(self.step + 1, True):
            self.take_through(self.step + 1)

    def take_through(self, step: int):
        """Takes the weights up to those of a step, one step's after the other; waits for them."""
        while self.step < step:
            self.step += 1
            if self._has_trained.pop(self.step, False):
                self.sync.run(is_checked=False)


class _RoundResponses:
    """A source of the requests of a round, which knows their responses: those that go on come first."""

    def __init__(self, others: RequestSource):
        """`others`: of the responses that have not begun."""
        self.responses: dict[int, Response] = {}  # that the engine has taken
        self._others, self._waiting = others, deque[int]()  # numbers of those that go on

    def take(self, room: int) -> list[tuple[int, GenerationRequest]]:
        numbers = [self._waiting.popleft() for _ in range(min(room, len(self._waiting)))]
        found = [(i, self.responses[i].request()) for i in numbers]
        return found if len(found) == room else found + self.begin(room - len(found))

    def begin(self, room: int) -> list[tuple[int, GenerationRequest]]:
        """At most `room` requests of responses that have not begun."""
        new = self._others.take(room)
        self.responses |= {i: Response(request) for i, request in new}
        return new

    def go_on(self, i: int):
        """Has the rest of a response generated."""
        self._waiting.append(i)

    def is_empty(self) -> bool:
        return not self._waiting and self._others.is_empty()

    def wait(self):
        self._others.wait()


class ScheduledRounds:
    """Runs the rounds of a replica, on all of its ranks."""

    def __init__(
        self, settings: Settings, role_groups: RoleGroups, engine: RolloutEngine, weights: HeldWeights,
        schedule: Schedule,
    ):  # fmt: skip
        self.settings, self.role_groups, self.engine = settings, role_groups, engine
        self.weights, self._schedule = weights, schedule
        self.groups: Tensor | None = None  # of the last round, ascending, that the clock took; None: it did not decide
        self.first = 0  # weights with which the round began
        self._round = (0, -1)
        self._record: RoundRecord | None = None  # that the round follows

    def end_step(self, step: int, has_trained: bool):
        """Notes whether a step that is generated changes the weights, and takes those that evaluation and the next
        round need. A collective of the rollout."""
        self.weights.end_step(step, has_trained)
        self.weights.take_through(step - self.settings.generation_lag)
        self.weights.sync.check()

    def begin(self, step: int):
        """Begins a round with the weights of the schedule, or with the newest that all replicas may have now. A
        collective of the rollout."""
        self._round = (step, self._round[1] + 1 if step == self._round[0] else 0)
        self._record = self._schedule.find(self._round)
        self._newest = bounds(self.settings, step, self._schedule.start)[1]
        self._segments: Segments = {}
        self._first_groups: FirstGroups | None = None
        if self._record is not None:
            self.weights.take_through(self._record.first)
        else:
            if self.role_groups.is_leader:
                self._schedule.open(self.role_groups.dp_rank)
            self.weights.skip_unchanged(self._newest)
            while min(self._of_replicas(self.role_groups.broadcast_number(int(self._may_take())))):
                self._take_next()
        self.first = self.weights.step

    def end(self):
        """Ends a round on all replicas with the newest weights that one of them has, and writes its record. A
        collective of the rollout."""
        record, role_groups = self._record, self.role_groups
        last = max(self._of_replicas(self.weights.step)) if record is None else record.last
        groups = None if record is None else record.groups
        if self._first_groups is not None:
            groups = self._first_groups.groups()  # all replicas have stopped
            self._first_groups.close()
        self.groups = None if groups is None else torch.tensor(groups, dtype=torch.int64)
        self.weights.take_through(last)
        self.weights.sync.check()
        if record is None and role_groups.is_leader:
            written = RoundRecord(self._round, self.first, last, groups, self._segments)
            self._schedule.append(written, role_groups.dp_rank, len(role_groups.replicas))

    def generate(
        self, step: int, requests: RoundRequests, mine: list[int], wanted: int | None, open_source: OpenSource,
        stream: Stream, empty_routes: Tensor | None, sender: ResponseSender | None,
    ) -> dict[int, Completion]:  # fmt: skip
        """A whole round: this replica's completions by sequence id; their versions are the weights of each token.

        Args:
            mine: ids of the requests of this replica where a schedule is followed.
            wanted: groups with which the clock ends the round; None: it ends with the last response.
            empty_routes: [0, L, k] routes of no tokens; None without routes.
            sender: as of `Rollout.generate`.
        """
        self.begin(step)
        if self._record is not None:
            responses = self._follow(self._record, requests, mine, stream)
        else:
            if wanted is not None:
                self._first_groups = FirstGroups(wanted, requests, self.role_groups)
            source, queue = open_source(wanted is not None)
            share = None if queue is None else queue.share
            responses = self._decide(source, len(requests), functools.partial(stream, share), sender)
            if queue is not None:
                queue.close()
        done = {i: response.completion() for i, response in responses.items()}
        for i, completion in done.items() if sender else ():
            sender.send(i, completion.tokens)  # that have not been sent yet
        segments = {i: [(span.weights, len(span.tokens)) for span in r.spans] for i, r in responses.items()}
        self._segments = {i: found for i, found in segments.items() if found}
        self.end()
        return {i: _with_routes(found, requests.response(i).row, empty_routes) for i, found in done.items()}

    def _may_take(self) -> bool:
        """Whether the next weights are there and allowed in this round. For leaders."""
        return self.role_groups.is_leader and self.weights.step < self._newest and self.weights.sync.is_next_there()

    def _take_next(self):
        self.weights.take_through(self.weights.step + 1)
        self.weights.skip_unchanged(self._newest)

    def _of_replicas(self, number: int) -> list[int]:
        """A number of each replica. A collective of the rollout."""
        table = torch.zeros(len(self.role_groups.replicas), dtype=torch.int64, device=device.device())
        table[self.role_groups.dp_rank] = number
        return self.role_groups.dp_all_reduce(table).tolist()

    def _look(self) -> int:
        """What the replica does now. A collective of it."""
        is_enough = self.role_groups.is_leader and self._first_groups is not None and self._first_groups.is_enough()
        return self.role_groups.broadcast_number(_STOP if is_enough else _TAKE_WEIGHTS * self._may_take())

    def _decide(
        self, others: RequestSource, count: int, stream: Callable, sender: ResponseSender | None
    ) -> dict[int, Response]:
        """Generates while the clock decides about weights and groups. `count`: responses of the round."""
        source = _RoundResponses(others)
        while True:
            for i, completion in stream(source, self._look):
                response = source.responses[i]
                response.take(completion, self.weights.step)
                if not response.has_ended:
                    source.go_on(i)
                    continue
                if self._first_groups is not None:
                    self._first_groups.ended(i, response.completion())
                if sender is not None:
                    sender.send(i, response.tokens)
            if self.engine.interrupted != _TAKE_WEIGHTS:
                break
            self._take_next()
        # Of a round that stopped early: others may not have begun, and belong to whoever takes them now.
        source.begin(count)
        return source.responses

    def _follow(
        self, record: RoundRecord, requests: RoundRequests, mine: list[int], stream: Stream
    ) -> dict[int, Response]:
        """Generates what a record says. Replicas that share experts run the engine for the same weights."""
        self._check_fits(record, requests)
        responses = {i: Response(request) for i, request in zip(mine, requests.build(mine), strict=True)}
        used = sorted({weights for segments in record.segments.values() for weights, _ in segments})
        for weights in used:
            self.weights.take_through(weights)
            counts = {i: dict(record.segments.get(i, ())).get(weights, 0) for i in mine}
            own = [(i, responses[i].request(counts[i])) for i in mine if counts[i]]
            running = stream(None, RequestList(own), None) if own or self.engine.is_coupled else ()
            for i, completion in running:
                responses[i].take(completion, weights)
                is_last = record.segments[i][-1][0] == weights
                if len(completion.tokens) != counts[i] or (completion.finished and not is_last):
                    raise self._error(f"response {i} ended after {responses[i].length} tokens")
        taken = range(len(requests.prompts)) if record.groups is None else record.groups
        for i in (i for i in mine if requests.group_of[i] in {*taken}):
            if not responses[i].has_ended:
                raise self._error(f"response {i} has not ended after {responses[i].length} tokens")
        return responses

    def _check_fits(self, record: RoundRecord, requests: RoundRequests):
        """UsageError if a record is of other requests."""
        counts = {i: sum(count for _, count in segments) for i, segments in record.segments.items()}
        if any(i >= len(requests) or not requests.is_open(i) or n > requests.limits[i] for i, n in counts.items()):
            raise self._error("it has other responses")
        if not {*(record.groups or ())} <= {*range(len(requests.prompts))}:
            raise self._error("it has other groups")

    def _error(self, problem: str) -> UsageError:
        return self._schedule.error(f"step {self._round[0]}: {problem}", self.role_groups.replica[0])


def _with_routes(completion: Completion, prompt: list[int], empty_routes: Tensor | None) -> Completion:
    """A completion with unknown routes if it lacks those that the round records: a later round reads it again."""
    if empty_routes is None or completion.routes is not None:
        return completion
    routes = unknown_routes(empty_routes, len(prompt) + len(completion.tokens))
    return dataclasses.replace(completion, routes=routes)
