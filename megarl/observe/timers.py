"""Wall time per role and phase on one rank, its reduction over the ranks of each role, and the timeline of all ranks.

The timeline is a trace file for Chrome (about:tracing) and Perfetto. Format: the "Trace Event Format" of Chrome, JSON
object form, complete events (`ph: X`), times in microseconds.
"""

import json
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple

from megarl.observe import activity
from megarl.observe.files import write_atomically

TIMELINE_FILE = "timeline.json"  # in the run's folder
# About 200 steps of 25 phases; at 100 bytes per event, 0.5 MB per rank.
MAX_EVENTS = 5000
ALL_RANKS_EVENTS = 200_000  # in a file: 20 MB, which viewers still open
STEP_CATEGORY = "step"


class TraceEvent(NamedTuple):
    """One span on one rank: start in nanoseconds since 1970, duration in nanoseconds."""

    name: str
    category: str
    start_ns: int
    duration_ns: int


def last_events(events: Sequence[TraceEvent], ranks: int) -> Sequence[TraceEvent]:
    """The last events of a rank, at most its share of `ALL_RANKS_EVENTS`, which rank 0 gathers."""
    return events[-max(1, ALL_RANKS_EVENTS // ranks) :]


def write_timeline(path: Path, events_by_rank: Sequence[Sequence[TraceEvent]]) -> None:
    """Write the events of all ranks (`events_by_rank[rank]`) as one trace, one row per rank, atomically.

    Times are relative to the earliest event, whose clock time is in `otherData`. Rows of ranks on one machine are
    aligned; rows of several machines are aligned as well as the machines' clocks are.
    """
    starts = [event.start_ns for events in events_by_rank for event in events]
    origin = min(starts, default=0)
    lines = [_metadata("process_name", 0, {"name": "megarl"})]
    for rank, events in enumerate(events_by_rank):
        lines.append(_metadata("thread_name", rank, {"name": f"rank {rank}"}))
        lines.append(_metadata("thread_sort_index", rank, {"sort_index": rank}))
        # Outer spans first: viewers nest events that start together in file order. A phase may fill its whole step to
        # the nanosecond; the step is still the outer one.
        ordered = sorted(
            events, key=lambda event: (event.start_ns, -event.duration_ns, event.category != STEP_CATEGORY)
        )
        lines += [_complete(event, rank, origin) for event in ordered]
    head = f'{{"displayTimeUnit": "ms", "otherData": {{"start_unix_ns": "{origin}"}}, "traceEvents": [\n'
    write_atomically(path, head + ",\n".join(lines) + "\n]}\n")


def _metadata(name: str, rank: int, args: dict) -> str:
    return json.dumps({"name": name, "ph": "M", "pid": 0, "tid": rank, "args": args})


def _complete(event: TraceEvent, rank: int, origin: int) -> str:
    times = {"ts": (event.start_ns - origin) / 1e3, "dur": event.duration_ns / 1e3}
    return json.dumps({"name": event.name, "cat": event.category, "ph": "X", **times, "pid": 0, "tid": rank})


EVALUATION = "eval_"  # prefix of the phases of an evaluation
IDLE_PHASES = frozenset({"wait", "exchange", f"{EVALUATION}wait", f"{EVALUATION}exchange"})
_NOTHING = nullcontext()
STEP = ("", "step")  # the key of the whole step's wall seconds in the results of `end_step`


class Timers:
    """Measures the phases of one rank.

    The time of a nested phase is subtracted from the outer one, so the phases never add up to more than the step.
    Times are host times: GPU work that is still running when a phase ends counts in the phase that waits for it.
    One thread enters phases; any thread may call `current()`.
    step  number of the running step, set by the training loop; 0 before the first.
    """

    def __init__(self):
        # perf_counter is monotonic but its origin differs per process; the wall clock aligns the ranks.
        self._clock_offset_ns = time.time_ns() - time.perf_counter_ns()
        self._events: deque[TraceEvent] = deque(maxlen=MAX_EVENTS)  # the oldest are dropped first
        self._seconds_ns: defaultdict[tuple[str, str], int] = defaultdict(int)
        self._open: list[list] = []  # [role, phase, nanoseconds of the phases inside, start]
        self._where: tuple[str, str] | None = None
        self._where_since_ns = time.perf_counter_ns()
        self._prefix = ""
        self._annotate: Callable[[str], AbstractContextManager] | None = None
        self._step_start_ns: int | None = None
        self.step = 0

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Phases inside belong to an evaluation: `rollout` becomes `eval_rollout`, and so on."""
        self._prefix = EVALUATION
        try:
            yield
        finally:
            self._prefix = ""

    @contextmanager
    def annotated(self, annotate: Callable[[str], AbstractContextManager]) -> Iterator[set[str]]:
        """Every phase inside also enters `annotate("role/phase")`, for a profiler; yields the set of these names."""
        names: set[str] = set()

        def noted(name: str) -> AbstractContextManager:
            names.add(name)
            return annotate(name)

        self._annotate = noted
        try:
            yield names
        finally:
            self._annotate = None

    @contextmanager
    def phase(self, role: str, name: str) -> Iterator[None]:
        """Time the body as phase `name` of `role`."""
        name = self._prefix + name
        activity.tick()
        start = time.perf_counter_ns()
        if self._step_start_ns is None:  # setup before the first phase belongs to no step
            self._step_start_ns = start
        frame = [role, name, 0, start]
        self._open.append(frame)
        self._where, self._where_since_ns = (role, name), start
        try:
            with _NOTHING if self._annotate is None else self._annotate(f"{role}/{name}"):
                yield
        except BaseException:
            self._close(frame)
            raise  # `current()` keeps naming the phase that failed
        now = self._close(frame)
        outer = self._open[-1] if self._open else None
        self._where, self._where_since_ns = ((outer[0], outer[1]), outer[3]) if outer else (None, now)

    def _close(self, frame: list) -> int:
        activity.tick()
        role, name, inside, start = frame
        now = time.perf_counter_ns()
        elapsed = now - start
        self._open.pop()
        self._seconds_ns[role, name] += elapsed - inside
        if self._open:
            self._open[-1][2] += elapsed
        self._trace(f"{role}/{name}", role, start, elapsed)
        return now

    def current(self) -> tuple[str, str] | None:
        """The innermost (role, phase) of this rank; None outside of phases.

        After an exception it remains the phase that raised, for the handler's message, until the next phase or
        `end_step`.
        """
        return self._where

    def current_seconds(self) -> float:
        """Seconds since what `current()` names began: the phase, or the time outside of phases."""
        return (time.perf_counter_ns() - self._where_since_ns) / 1e9

    def end_step(self, step: int | None = None) -> dict[tuple[str, str], float]:
        """Seconds of each (role, phase) since the last call, and of the whole step under `STEP`; then reset.

        The first step starts with its first phase, every other one when the previous step ended. `step` names it in
        the timeline. Raises RuntimeError inside a phase.
        """
        if self._open:
            raise RuntimeError(f"end_step() called inside phase {self._open[-1][0]}/{self._open[-1][1]}")
        now = time.perf_counter_ns()
        start = now if self._step_start_ns is None else self._step_start_ns
        name = "step" if step is None else f"step {step}"
        self._trace(name, STEP_CATEGORY, start, now - start)
        times = {key: spent / 1e9 for key, spent in self._seconds_ns.items()}
        times[STEP] = (now - start) / 1e9
        self._seconds_ns.clear()
        self._step_start_ns = now
        self._where, self._where_since_ns = None, now
        return times

    def _trace(self, name: str, category: str, start: int, duration: int):
        start_ns = start + self._clock_offset_ns
        self._events.append(TraceEvent(name=name, category=category, start_ns=start_ns, duration_ns=duration))

    def events(self) -> list[TraceEvent]:
        """The trace so far, in order of phase ends; picklable, to be gathered for `write_timeline`."""
        return list(self._events)


def reduce_times(
    times_of_rank: Sequence[Mapping[tuple[str, str], float]], roles_of_rank: Sequence[Collection[str]]
) -> dict[str, float]:
    """Metrics of one step from the times of all ranks.

    times_of_rank      result of `Timers.end_step` of each rank.
    roles_of_rank      roles of each rank.

    `time/<role>/<phase>_s`      maximum over the role's ranks.
    `time/<role>/idle_fraction`  mean over the role's ranks of 1 - busy / step. Busy is the time in all phases that are
                                 not idle, of all roles of that rank: a rank that runs another role is not idle.
    `time/idle_fraction`         the same over all ranks: the idle share of the whole machine's time.
    `time/step_s`                maximum over all ranks; a rank's step ends when its own work is done.
    Phases that a rank records for a role that it does not have are waits, and are ignored.
    """
    reduced = {"time/step_s": max(rank_times[STEP] for rank_times in times_of_rank)}
    idle_fractions, all_fractions = defaultdict(list), []
    for rank_times, roles in zip(times_of_rank, roles_of_rank, strict=True):
        busy = 0.0
        for (role, phase), seconds in rank_times.items():
            if role in roles:
                name = f"time/{role}/{phase}_s"
                reduced[name] = max(reduced.get(name, 0.0), seconds)
                busy += 0.0 if phase in IDLE_PHASES else seconds
        step_seconds = rank_times[STEP]
        idle = max(0.0, 1.0 - busy / step_seconds) if step_seconds > 0 else 0.0
        all_fractions.append(idle)
        for role in roles:
            idle_fractions[role].append(idle)
    for role, fractions in idle_fractions.items():
        reduced[f"time/{role}/idle_fraction"] = sum(fractions) / len(fractions)
    reduced["time/idle_fraction"] = sum(all_fractions) / len(all_fractions)
    return reduced
