"""Rounds in which the weights may change: by the clock, which is recorded, or as a schedule says.

Every `POLL_STEPS` engine steps a replica looks whether the actor has sent the next weights. If so, it leaves the
engine, takes them, and continues its responses: what they have is read again as part of their prompts, so the cache is
computed with the new weights. A response's tokens depend on the weights of each token, never on when or where.
"""

from collections import deque
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from megarl.arguments import Settings
from megarl.comm.role_mesh import RoleGroups
from megarl.errors import UsageError
from megarl.mcore import device
from megarl.mcore.inference.engine import RequestList, RequestSource, RolloutEngine
from megarl.mcore.inference.generation import Completion, GenerationRequest, Response
from megarl.rollout.request_queue import FirstGroups
from megarl.rollout.requests import RoundRequests
from megarl.rollout.schedule import RoundRecord, Schedule, Segments, bounds
from megarl.rollout.weight_sync import WeightSync

_GO_ON, _TAKE_WEIGHTS, _STOP = 0, 1, 2  # what a replica does after a look

# Runs the engine for a source of requests, with further arguments by name, as of `RolloutEngine.stream`.
Stream = Callable[..., Iterator[tuple[int, Completion]]]


class GoingOn:
    """A source of requests over another one, with the rest of those that the engine was stopped in first."""

    def __init__(self, others: RequestSource, responses: dict[int, Response]):
        self._others, self._responses, self._waiting = others, responses, deque[int]()

    def take(self, room: int) -> list[tuple[int, GenerationRequest]]:
        numbers = [self._waiting.popleft() for _ in range(min(room, len(self._waiting)))]
        found = [(i, self._responses[i].request()) for i in numbers]
        return found if len(found) == room else found + self._others.take(room - len(found))

    def add(self, i: int):
        """Has the rest of a response generated."""
        self._waiting.append(i)

    def is_empty(self) -> bool:
        return not self._waiting and self._others.is_empty()

    def wait(self):
        self._others.wait()


class ScheduledRounds:
    """Runs the rounds of a replica, on all of its ranks."""

    def __init__(
        self, settings: Settings, role_groups: RoleGroups, engine: RolloutEngine, sync: WeightSync, schedule: Schedule
    ):
        self.settings, self.role_groups, self.engine = settings, role_groups, engine
        self.sync, self._schedule = sync, schedule
        self.step = 0  # whose weights this rank of the rollout holds
        self._has_trained: dict[int, bool] = {}  # of later steps; one without a batch sends no weights
        self.groups: Tensor | None = None  # of the last round, ascending, that the clock took; None: it did not decide
        self.first = 0  # weights with which the round began
        self._round = (0, -1)
        self.record: RoundRecord | None = None  # that the round follows

    def end_step(self, step: int, has_trained: bool):
        """Notes whether a step changes the weights, and takes those that evaluation and the next round need.
        Collective."""
        self._has_trained[step] = has_trained
        self._take_through(step - self.settings.generation_lag)
        self.sync.check()

    def _skip_unchanged(self):
        """Goes on to the last of the next steps whose weights are the same."""
        while self.step < self._newest and not self._has_trained.get(self.step + 1, True):
            self._take_through(self.step + 1)

    def _take_through(self, step: int):
        """Takes the weights up to those of a step, one step's after the other; waits for them."""
        while self.step < step:
            self.step += 1
            if self._has_trained.pop(self.step, False):
                self.sync.run(is_checked=False)

    def begin(self, step: int):
        """Begins a round with the weights of the schedule, or with the newest that all replicas may have now.
        Collective."""
        self._round = (step, self._round[1] + 1 if step == self._round[0] else 0)
        self.record = self._schedule.find(self._round)
        self._newest = bounds(self.settings, step, self._schedule.start)[1]
        self._segments: Segments = {}
        self.first_groups: FirstGroups | None = None  # that the clock takes
        if self.record is not None:
            self._take_through(self.record.first)
        else:
            if self.role_groups.is_leader:
                self._schedule.open(self.role_groups.dp_rank)
            self._skip_unchanged()
            while min(self._of_replicas(self.role_groups.broadcast_number(int(self._may_take())))):
                self._take_next()
        self.first = self.step

    def end(self):
        """Ends a round on all replicas with the newest weights that one of them has, and writes its record. A
        collective of the rollout."""
        record, role_groups = self.record, self.role_groups
        last = max(self._of_replicas(self.step)) if record is None else record.last
        groups = None if record is None else record.groups
        if self.first_groups is not None:
            groups = self.first_groups.groups()  # all replicas have stopped
            self.first_groups.close()
        self.groups = None if groups is None else torch.tensor(groups, dtype=torch.int64)
        self._take_through(last)
        self.sync.check()
        if record is None and role_groups.is_leader:
            written = RoundRecord(self._round, self.first, last, groups, self._segments)
            self._schedule.append(written, role_groups.dp_rank, len(role_groups.replicas))

    def _may_take(self) -> bool:
        """Whether the next weights are there and allowed in this round. For leaders."""
        return self.role_groups.is_leader and self.step < self._newest and self.sync.is_next_there()

    def _take_next(self):
        self._take_through(self.step + 1)
        self._skip_unchanged()

    def _of_replicas(self, number: int) -> list[int]:
        table = torch.zeros(len(self.role_groups.replicas), dtype=torch.int64, device=device.device())
        table[self.role_groups.dp_rank] = number
        return self.role_groups.dp_all_reduce(table).tolist()

    def look(self) -> int:
        """What the replica does now, to be asked while the engine runs. A collective of the replica."""
        is_enough = self.role_groups.is_leader and self.first_groups is not None and self.first_groups.is_enough()
        return self.role_groups.broadcast_number(_STOP if is_enough else _TAKE_WEIGHTS * self._may_take())

    def note(self, i: int, count: int):
        """Notes that a response has got that many tokens from the present weights."""
        if count:
            self._segments.setdefault(i, []).append((self.step, count))

    def goes_on(self) -> bool:
        """Whether the engine was stopped for the next weights; takes them."""
        if self.engine.interrupted != _TAKE_WEIGHTS:
            return False
        self._take_next()
        return True

    def follow(self, requests: RoundRequests, mine: list[int], stream: Stream, version_of: Callable[[int], int]):
        """Generates what the record says, of the ids `mine`. Replicas that share experts run the engine for the same
        weights. `version_of`: the policy's version of weights."""
        record, responses = self.record, requests.responses
        self._check_fits(record, requests)
        requests.build(mine)
        used = sorted({weights for segments in record.segments.values() for weights, _ in segments})
        for weights in used:
            self._take_through(weights)
            counts = {i: dict(record.segments.get(i, ())).get(weights, 0) for i in mine}
            own = [(i, responses[i].request(counts[i])) for i in mine if counts[i]]
            for i, completion in stream(RequestList(own)) if own or self.engine.is_coupled else ():
                response = requests.take(i, completion, version_of(weights))
                is_last = record.segments[i][-1][0] == weights
                if len(completion.tokens) != counts[i] or (completion.finished and not is_last):
                    raise self._error(f"response {i} ended after {response.new} tokens")
        taken = {*range(len(requests.prompts))} if record.groups is None else {*record.groups}
        for i in (i for i in mine if requests.group_of[i] in taken and not responses[i].has_ended):
            raise self._error(f"response {i} has not ended after {responses[i].new} tokens")

    def _check_fits(self, record: RoundRecord, requests: RoundRequests):
        """UsageError if a record is of other requests."""
        counts = {i: sum(count for _, count in segments) for i, segments in record.segments.items()}
        if any(i >= len(requests) or not requests.is_open(i) or n > requests.limits[i] for i, n in counts.items()):
            raise self._error("it has other responses")
        if not {*(record.groups or ())} <= {*range(len(requests.prompts))}:
            raise self._error("it has other groups")

    def _error(self, problem: str) -> UsageError:
        return self._schedule.error(f"step {self._round[0]}: {problem}", self.role_groups.replica[0])
