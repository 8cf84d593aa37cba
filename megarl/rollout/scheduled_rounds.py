"""Rounds in which the weights may change: by the clock, which is recorded, or as a schedule says.

Every `POLL_STEPS` engine steps a replica looks whether the actor has sent the next weights. If so, it leaves the
engine, takes them, and continues its responses: what they have is read again as part of their prompts, so the cache is
computed with the new weights. A response's tokens depend on the weights of each token, never on when or where.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from megarl.arguments import Settings
from megarl.comm.early_responses import ResponseSender
from megarl.comm.role_mesh import RoleGroups
from megarl.errors import UsageError
from megarl.mcore import device
from megarl.mcore.inference.engine import RequestList, RequestSource, RolloutEngine
from megarl.mcore.inference.generation import Completion, GenerationRequest
from megarl.rollout.request_queue import FirstGroups, SharedRequestQueue
from megarl.rollout.requests import RoundRequests, unknown_routes
from megarl.rollout.schedule import RoundRecord, Schedule, Segments, bounds
from megarl.rollout.weight_sync import WeightSync

_GO_ON, _TAKE_WEIGHTS, _STOP = 0, 1, 2  # what a replica does after a look

_EMPTY = Completion(tokens=[], logprobs=[], finished=False)

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


@dataclasses.dataclass
class _Progress:
    """What a response has got in the round."""

    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    segments: list[tuple[int, int]] = dataclasses.field(default_factory=list)  # (weights, tokens)

    def add(self, completion: Completion, weights: int) -> Completion:
        """Adds what the engine returned; returns all of it, with the weights of each token as its versions."""
        self.tokens += completion.tokens
        self.logprobs += completion.logprobs
        if completion.tokens:
            self.segments.append((weights, len(completion.tokens)))
        versions = [weights for weights, count in self.segments for _ in range(count)]
        return dataclasses.replace(completion, tokens=self.tokens, logprobs=self.logprobs, versions=versions)

    def continuation(self, request: GenerationRequest, max_new_tokens: int) -> GenerationRequest:
        """The request for the next tokens."""
        return dataclasses.replace(request, prompt=[*request.prompt, *self.tokens], max_new_tokens=max_new_tokens)


class _Continued(NamedTuple):
    """A source of requests that continue, and then those of another source."""

    continued: RequestList
    others: RequestSource

    def take(self, room: int) -> list[tuple[int, GenerationRequest]]:
        first = self.continued.take(room)
        return first if len(first) == room else first + self.others.take(room - len(first))

    def is_empty(self) -> bool:
        return self.continued.is_empty() and self.others.is_empty()

    def wait(self):
        self.others.wait()


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
        progress: dict[int, _Progress] = {}
        if self._record is not None:
            done = self._follow(self._record, requests, mine, stream, progress)
        else:
            if wanted is not None:
                self._first_groups = FirstGroups(wanted, requests, self.role_groups)
            source, queue = open_source(wanted is not None)
            share = None if queue is None else queue.share
            done = self._decide(requests, source, functools.partial(stream, share), progress, sender)
            if queue is not None:
                queue.close()
        for i, completion in done.items() if sender else ():
            sender.send(i, completion.tokens)  # that have not been sent yet
        self._segments = {i: found.segments for i, found in progress.items() if found.segments}
        self.end()
        return {i: _with_routes(found, requests.prompt(i), empty_routes) for i, found in done.items()}

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
        self, requests: RoundRequests, source: RequestSource, stream: Callable, progress: dict[int, _Progress],
        sender: ResponseSender | None,
    ) -> dict[int, Completion]:  # fmt: skip
        """Generates while the clock decides about weights and groups."""
        done: dict[int, Completion] = {}
        continued: list[tuple[int, GenerationRequest]] = []
        while True:
            unfinished: dict[int, Completion] = {}
            waiting = RequestList(continued)
            for i, completion in stream(_Continued(waiting, source), self._look):
                whole = progress.setdefault(i, _Progress()).add(completion, self.weights.step)
                if completion.finished or len(whole.tokens) == requests.limits[i]:
                    done[i] = whole
                    if self._first_groups is not None:
                        self._first_groups.ended(i, whole)
                    if sender is not None:
                        sender.send(i, whole.tokens)
                else:
                    unfinished[i] = whole
            for i, _ in waiting.take(len(requests)):  # the engine had no room for them yet
                unfinished[i] = progress[i].add(_EMPTY, self.weights.step)
            if self.engine.interrupted != _TAKE_WEIGHTS:
                break
            self._take_next()
            asked = zip(unfinished, requests.build([*unfinished]), strict=True)
            continued = [
                (i, progress[i].continuation(request, request.max_new_tokens - len(progress[i].tokens)))
                for i, request in asked
            ]
        # Of a round that stopped early: others may not have begun, and belong to whoever takes them now.
        begun = done | unfinished
        return begun | {i: _EMPTY for i, _ in source.take(len(requests))}

    def _follow(
        self, record: RoundRecord, requests: RoundRequests, mine: list[int], stream: Stream,
        progress: dict[int, _Progress],
    ) -> dict[int, Completion]:  # fmt: skip
        """Generates what a record says. Replicas that share experts run the engine for the same weights."""
        done = dict.fromkeys(mine, _EMPTY)
        self._check_fits(record, requests)
        used = sorted({weights for segments in record.segments.values() for weights, _ in segments})
        for weights in used:
            self.weights.take_through(weights)
            counts = {i: dict(record.segments.get(i, ())).get(weights, 0) for i in mine}
            ids = [i for i in mine if counts[i]]
            asked = zip(ids, requests.build(ids), strict=True)
            own = [(i, progress.setdefault(i, _Progress()).continuation(one, counts[i])) for i, one in asked]
            running = stream(None, RequestList(own), None) if own or self.engine.is_coupled else ()
            for i, completion in running:
                done[i] = progress[i].add(completion, weights)
                is_last = record.segments[i][-1][0] == weights
                if len(completion.tokens) != counts[i] or (completion.finished and not is_last):
                    raise self._error(f"response {i} ended after {len(done[i].tokens)} tokens")
        taken = range(len(requests.prompts)) if record.groups is None else record.groups
        for i in (i for i in mine if requests.group_of[i] in {*taken}):
            if not done[i].finished and len(done[i].tokens) != requests.limits[i]:
                raise self._error(f"response {i} has not ended after {len(done[i].tokens)} tokens")
        return done

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
