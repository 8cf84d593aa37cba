"""The timeline of all ranks as a trace file for Chrome (about:tracing) and Perfetto.

Format: the "Trace Event Format" of Chrome, JSON object form, complete events (`ph: X`), times in microseconds.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

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
        # Outer spans first: viewers nest events that start together in file order.
        for event in sorted(events, key=_outer_first):
            lines.append(_complete(event, rank, origin))
    head = f'{{"displayTimeUnit": "ms", "otherData": {{"start_unix_ns": "{origin}"}}, "traceEvents": [\n'
    write_atomically(path, head + ",\n".join(lines) + "\n]}\n")


def _outer_first(event: TraceEvent) -> tuple:
    # A phase may fill its whole step to the nanosecond; the step is still the outer one.
    return event.start_ns, -event.duration_ns, event.category != STEP_CATEGORY


def _metadata(name: str, rank: int, args: dict) -> str:
    return json.dumps({"name": name, "ph": "M", "pid": 0, "tid": rank, "args": args})


def _complete(event: TraceEvent, rank: int, origin: int) -> str:
    times = {"ts": (event.start_ns - origin) / 1e3, "dur": event.duration_ns / 1e3}
    return json.dumps({"name": event.name, "cat": event.category, "ph": "X", **times, "pid": 0, "tid": rank})
