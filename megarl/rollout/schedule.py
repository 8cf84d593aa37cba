"""Which weights drew each token and which groups a batch has, with `--generation-schedule recorded`: on disk.

`DIR/schedule/replica_00000.jsonl`, one file a replica of the rollout, has a line for each round: the weights from the
round's begin to its end, the groups that over-sampling took, and how many tokens each response got from which weights.
Weights are named by the step after which the actor has them. A round's line is on disk before its batch is announced,
so a run that was killed follows its own lines before the clock decides again. Each line ends with a checksum of itself
and of all lines before it. A line `run` says with which settings the lines after it were recorded.
"""

import hashlib
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from megarl.arguments import Settings
from megarl.errors import UsageError
from megarl.observe.files import write_atomically
from megarl.plain_files import open_bytes, parse_json, reading
from megarl.plain_values import Each, fits, is_count, is_whole

FOLDER = "schedule"
MAX_LINE = 2**28  # bytes
MAX_REPLICAS = 2**20
_SHA = ', "sha": "'  # between a line's content and its checksum

Round = tuple[int, int]  # a step, and the number of the round in it, from 0
Segments = dict[int, list[tuple[int, int]]]  # sequence id -> (weights, new tokens) in order; responses with new tokens


def _is_pair(value: Any) -> bool:
    return fits(value, [is_count]) and len(value) == 2


def _is_id(name: str) -> bool:
    return name == "0" or name.isascii() and name.isdigit() and name[0] != "0" and len(name) < 16


# What lines are (`plain_values`). A schema, since whoever edits a line can write its checksum, too.
_RUN = {"run": {"seed": int, "data": Each(str), "settings": dict}}
_ROUND = {
    "step": is_count, "round": is_count, "weights": _is_pair, "groups": (None, [is_count]),
    "segments": Each([_is_pair], _is_id), "replica": is_count,
    "replicas": lambda value: is_whole(value, 1, MAX_REPLICAS),
}  # fmt: skip


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
        return {"step": step, "round": number, "weights": [self.first, self.last], "groups": self.groups,
                "segments": segments}  # fmt: skip

    @classmethod
    def decode(cls, line: dict[str, Any]) -> "RoundRecord":
        """The record of a line that fits `_ROUND`."""
        first, last = line["weights"]
        segments = {int(i): [(weights, count) for weights, count in found] for i, found in line["segments"].items()}
        return cls((line["step"], line["round"]), first, last, line["groups"], segments)


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


class _Line(NamedTuple):
    """A line of a file, and where it ends."""

    content: dict[str, Any]
    sha: str
    end: int  # bytes of the file up to here


def _read_lines(path: Path, flag: str) -> Iterator[_Line]:
    """The whole lines of a replica's file. A last line that a kill cut is left out. UsageError if one is damaged."""
    with reading(f"{flag} {path}"), open_bytes(path) as file:
        sha, end = "", 0
        for number in itertools.count(1):
            raw = file.readline(MAX_LINE)
            if not raw.endswith(b"\n") and len(raw) < MAX_LINE:
                return
            end += len(raw)
            with reading(f"{flag} {path}", f"line {number} is damaged"):
                content, sha = _line_of(raw, sha)
            yield _Line(content, sha, end)


def _line_of(raw: bytes, before: str) -> tuple[dict[str, Any], str]:
    """The content of a line and its checksum; `before`: that of the line before it. ValueError if it is damaged."""
    if len(raw) == MAX_LINE:
        raise ValueError(f"it has {MAX_LINE:,} bytes or more")
    text, _, tail = raw[:-1].decode("utf-8", errors="replace").rpartition(_SHA)
    sha = tail[:-2]
    if sha != _sha(before, text) or tail[-2:] != '"}':
        raise ValueError("its checksum is wrong")
    content = parse_json(text + "}")
    if not fits(content, _RUN if "run" in content else _ROUND):
        raise ValueError("it is not what megarl writes")
    return content, sha


def _sha(before: str, text: str) -> str:
    return hashlib.sha256((before + text).encode("utf-8", errors="replace")).hexdigest()[:32]


class Recording(NamedTuple):
    """The schedule in a folder."""

    path: str  # as in messages, with its flag
    rounds: dict[Round, RoundRecord]  # that all replicas have written
    runs: dict[Round, dict[str, Any]]  # the line `run` before each of these rounds

    @classmethod
    def read(cls, folder: Path, flag: str, path: str) -> "Recording":
        """Reads the files of all replicas. UsageError if they are damaged; a schedule without files has no rounds."""
        where, shares, runs = f"{flag} {path}", {}, {}
        for file in sorted(folder.glob("replica_*.jsonl")):
            run: dict[str, Any] = {}
            for line in _read_lines(file, flag):
                if "run" in line.content:
                    run = line.content["run"]
                    continue
                record, key = RoundRecord.decode(line.content), (line.content["replica"], line.content["replicas"])
                shares.setdefault(record.round, {})[key], runs[record.round] = record, run
        rounds = {}
        for number in sorted(shares):
            if merged := _merged(shares[number], where):
                rounds[number] = merged
        return cls(where, rounds, runs)


def _merged(shares: dict[tuple[int, int], RoundRecord], where: str) -> RoundRecord | None:
    """The record of all replicas; None if some had not written their line. UsageError if they contradict each other."""
    for replicas in {replicas for _, replicas in shares}:
        found = [shares[i, replicas] for i in range(replicas) if (i, replicas) in shares]
        if len(found) == replicas:
            segments = {i: segments for record in found for i, segments in record.segments.items()}
            is_one = all(record[:4] == found[0][:4] for record in found)
            if not is_one or len(segments) != sum(len(record.segments) for record in found):
                raise UsageError(f"{where}: the replicas' lines of step {found[0].round[0]} are of different runs")
            return found[0]._replace(segments=segments)
    return None


class Schedule:
    """What the rounds of a run follow, and what is written of them."""

    def __init__(self, recording: Recording, start: int, folder: Path | None, run: dict[str, Any]):
        """
        Args:
            recording: rounds that are followed.
            start: step after which the run begins.
            folder: of the run, where rounds are written in which the clock has decided; None: it decides in none.
            run: the line `run` of this run.
        """
        self._recording, self._folder, self._run = recording, folder, run
        self.start = start
        self.is_replay = folder is None
        self._file: Path | None = None  # once it is open
        self._sha = ""

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
        """Begins to write this replica's rounds, on its leader: after the last line of a round that all have written.

        All replicas do so before one of them writes, so that no line of a killed run is taken for one of this run.
        """
        if self._file is not None:
            return
        assert self._folder is not None  # the clock decides
        self._folder.mkdir(parents=True, exist_ok=True)
        self._file, end, run = self._folder / f"replica_{replica:05d}.jsonl", 0, None
        self._file.touch()
        last = max(self._recording.rounds, default=(0, 0))
        for line in _read_lines(self._file, "--save"):
            is_round = "run" not in line.content
            if is_round and (line.content["step"], line.content["round"]) > last:
                break
            self._sha, end, run = line.sha, line.end, run if is_round else line.content["run"]
        with open_bytes(self._file) as file:
            kept = file.read(end)
        write_atomically(self._file, kept)
        if run != self._run:
            self._write({"run": self._run})

    def append(self, record: RoundRecord, replica: int, replicas: int):
        """Writes a round of this replica, once it is open; on return the line survives a crash of the machine."""
        self._write(record.encode() | {"replica": replica, "replicas": replicas})

    def _write(self, content: dict[str, Any]):
        assert self._file is not None  # `open` comes first
        text = json.dumps(content)[:-1]
        self._sha = _sha(self._sha, text)
        with open(self._file, "a", encoding="utf-8") as file:
            file.write(f'{text}{_SHA}{self._sha}"}}\n')
            file.flush()
            os.fsync(file.fileno())
