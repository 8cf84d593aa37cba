"""Which weights drew each token, and which groups a batch has (`--generation-schedule recorded`): on disk and followed.

`DIR/schedule/replica_00000.log`, one log (`response_log`) a replica of the rollout, has a record for each round: the
weights from the round's begin to its end, the groups that over-sampling took, and how many tokens each response got
from which weights. Weights are named by the step after which the actor has them. A round's record is on disk before its
batch is announced, so a run that was killed follows its own ones before the clock decides again. A record `run` says
with which settings those after it were made.

Every `POLL_STEPS` engine steps a replica looks whether the actor has sent the next weights. If so, it leaves the
engine, takes them, and continues its responses: what they have is read again as part of their prompts, so the cache is
computed with the new weights. A response's tokens depend on the weights of each token, never on when or where.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megarl.arguments import Settings
from megarl.comm.role_mesh import RoleGroups
from megarl.errors import UsageError
from megarl.mcore import device
from megarl.mcore.inference.engine import RequestList, RolloutEngine
from megarl.mcore.inference.generation import Completion
from megarl.plain_files import reading
from megarl.plain_values import Each, fits, is_count, is_whole
from megarl.rollout import response_log
from megarl.rollout.request_queue import GroupEarlyStop
from megarl.rollout.requests import RoundRequests
from megarl.rollout.response_log import Entry
from megarl.rollout.weight_sync import WeightSync

FOLDER, FILES = "schedule", f"replica_*{response_log.SUFFIX}"
MAX_REPLICAS = 2**20

Round = tuple[int, int]  # a step, and the number of the round in it, from 0
Segments = dict[int, list[tuple[int, int]]]  # sequence id -> (weights, new tokens) in order; responses with new tokens


def _is_pair(value: Any) -> bool:
    return fits(value, [is_count]) and len(value) == 2


def _is_id(name: str) -> bool:
    return name == "0" or name.isascii() and name.isdigit() and name[0] != "0" and len(name) < 16


# What records are (`plain_values`). A schema, since whoever edits a file can write its checksums, too.
_RUN = {"run": {"seed": int, "data": Each(str), "settings": dict}}
_ROUND = dict.fromkeys(("step", "round", "replica"), is_count) | {
    "weights": _is_pair,
    "groups": (None, [is_count]),
    "segments": Each([_is_pair], _is_id),
    "replicas": lambda value: is_whole(value, 1, MAX_REPLICAS),
}


class RoundRecord(NamedTuple):
    """What was decided in a round."""

    round: Round
    first: int  # weights with which the round begins
    last: int  # weights with which it ends
    groups: list[int] | None  # that over-sampling took; None: the clock did not decide
    segments: Segments

    def encode(self) -> dict[str, Any]:
        """The record as JSON."""
        step, number = self.round
        segments = {str(i): segments for i, segments in self.segments.items()}
        place = {"step": step, "round": number, "weights": [self.first, self.last]}
        return place | {"groups": self.groups, "segments": segments}

    @classmethod
    def decode(cls, facts: dict[str, Any]) -> "RoundRecord":
        """The record of facts that fit `_ROUND`."""
        first, last = facts["weights"]
        segments = {int(i): [(weights, count) for weights, count in found] for i, found in facts["segments"].items()}
        return cls((facts["step"], facts["round"]), first, last, facts["groups"], segments)


def bounds(settings: Settings, step: int, start: int) -> tuple[int, int]:
    """The oldest and the newest weights with which the rollout may generate for a step of a run that begins after
    `start`.

    The ranks that train meet the rollout after a step with an evaluation or a checkpoint, for which it needs the
    weights of this step: it takes newer ones only after that.
    """
    oldest, newest = max(0, step - 1 - settings.generation_lag), step - 1
    intervals = [interval for interval in (settings.save_interval, settings.eval_interval) if interval]
    meetings = (after for after in range(max(start, oldest) + 1, newest) if any(after % n == 0 for n in intervals))
    return oldest, next(meetings, newest)


def check(record: RoundRecord, settings: Settings, start: int) -> str | None:
    """What is wrong with a round in a run of these settings that begins after `start`; None if it can be followed."""
    step = record.round[0]
    oldest, newest = bounds(settings, step, start)
    if not oldest <= record.first <= record.last < step:
        return (
            f"step {step} has the weights of steps {record.first} to {record.last}; allowed are {oldest} to {step - 1}"
        )
    if record.last > newest:
        return (
            f"step {step} has the weights of step {record.last}, and this run meets for an evaluation or a checkpoint "
            f"after step {newest}; allowed are --eval-interval and --save-interval of the recorded run"
        )
    for number, segments in record.segments.items():
        weights, counts = [weights for weights, _ in segments], [count for _, count in segments]
        is_ascending = weights and [record.first, *weights, record.last] == sorted(
            [record.first, *weights, record.last]
        )
        if number < 0 or not is_ascending or len({*weights}) < len(weights) or min(counts) < 1:
            return f"step {step}: the segments of response {number} are none"
    return None


def _entries(path: Path, flag: str) -> list[Entry]:
    """The records of a replica, without a last one that a kill has cut. UsageError if one is damaged."""
    found = response_log.whole(path, f"{flag} {path}", has_ended=False)
    with reading(f"{flag} {path}", "is damaged"):
        if not all(fits(entry.facts, _RUN if "run" in entry.facts else _ROUND) for entry in found):
            raise ValueError("it is not what megarl writes")
    return found


class Recording(NamedTuple):
    """The schedule in a folder."""

    path: str  # as in messages, with its flag
    rounds: dict[Round, RoundRecord]  # that all replicas have written
    runs: dict[Round, dict[str, Any]]  # the record `run` before each of these rounds

    @classmethod
    def read(cls, folder: Path, flag: str, path: str) -> "Recording":
        """Reads the files of all replicas. UsageError if they are damaged; a schedule without files has no rounds."""
        where, shares, runs = f"{flag} {path}", {}, {}
        for file in sorted(folder.glob(FILES)):
            run: dict[str, Any] = {}
            for facts in (entry.facts for entry in _entries(file, flag)):
                if "run" in facts:
                    run = facts["run"]
                    continue
                record = RoundRecord.decode(facts)
                shares.setdefault(record.round, {})[facts["replica"], facts["replicas"]] = record
                runs[record.round] = run
        rounds = {}
        for number in sorted(shares):
            if merged := _merged(shares[number], where):
                rounds[number] = merged
        return cls(where, rounds, runs)


def _merged(shares: dict[tuple[int, int], RoundRecord], where: str) -> RoundRecord | None:
    """The record of all replicas; None if some had not written theirs. UsageError if they contradict each other."""
    for replicas in {replicas for _, replicas in shares}:
        found = [shares[i, replicas] for i in range(replicas) if (i, replicas) in shares]
        if len(found) == replicas:
            segments = {i: segments for record in found for i, segments in record.segments.items()}
            is_one = all(record[:4] == found[0][:4] for record in found)
            if not is_one or len(segments) != sum(len(record.segments) for record in found):
                raise UsageError(f"{where}: the replicas' records of step {found[0].round[0]} are of different runs")
            return found[0]._replace(segments=segments)
    return None


class Schedule:
    """What the rounds of a run follow, and what is written of them."""

    def __init__(self, recording: Recording, start: int, folder: Path | None, run: dict[str, Any]):
        """`recording`: rounds that are followed; `start`: step after which the run begins; `folder`: of the run, where
        rounds are written in which the clock has decided; None: it decides in none; `run`: its record `run`."""
        self._recording, self._folder, self._run = recording, folder, run
        self.start = start
        self.is_replay = folder is None
        self._file: int | None = None  # descriptor of this replica's log, once it is open

    def find(self, number: Round) -> RoundRecord | None:
        """The record of a round; None: the clock decides.

        Raises:
            UsageError: the clock must not decide.
        """
        record = self._recording.rounds.get(number)
        if record is None and self.is_replay:
            raise UsageError(f"{self._recording.path}: has no round {number[1]} of step {number[0]}")
        return record

    def error(self, problem: str, rank: int) -> UsageError:
        """That this run cannot follow the schedule, to be reported by a rank."""
        return UsageError(f"{self._recording.path}: {problem}; other weights, kernels or settings recorded it", rank)

    def needs(self, step: int) -> int:
        """The newest weights that the rounds up to a step have in what is followed."""
        return max((record.last for number, record in self._recording.rounds.items() if number[0] <= step), default=0)

    def open(self, replica: int):
        """Begins to write this replica's rounds, on its leader: after the last record of a round that all have written.

        All replicas do so before one of them writes, so that none of a killed run is taken for one of this run.
        """
        if self._file is not None:
            return
        assert self._folder is not None  # the clock decides
        self._folder.mkdir(parents=True, exist_ok=True)
        path, end, run = self._folder / FILES.replace("*", f"{replica:05d}"), 0, None
        self._file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o666)
        last = max(self._recording.rounds, default=(0, 0))
        for entry in _entries(path, "--save"):
            facts = entry.facts
            if "run" not in facts and (facts["step"], facts["round"]) > last:
                break
            end, run = entry.end, facts.get("run", run)
        os.ftruncate(self._file, end)
        if run != self._run:
            self._write({"run": self._run})

    def append(self, record: RoundRecord, replica: int, replicas: int):
        """Writes a round of this replica, once it is open; on return the record survives a crash of the machine."""
        self._write(record.encode() | {"replica": replica, "replicas": replicas})

    def _write(self, facts: dict[str, Any]):
        assert self._file is not None  # `open` comes first
        response_log.append(self._file, response_log.packed(facts, {}))
        os.fsync(self._file)


# -- rounds that follow a schedule, or make one ------------------------------------------------------------------------


_TAKE_WEIGHTS, _STOP = 1, 2  # what a replica does after a look; 0: it goes on

# Runs the engine for a source of requests, with further arguments by name, as of `RolloutEngine.stream`.
Stream = Callable[..., Iterator[tuple[int, Completion]]]


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
        self.first_groups: GroupEarlyStop | None = None  # that the clock takes
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
            groups = self.first_groups.first_groups()  # all replicas have stopped
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
