"""Judges from the ranks' heartbeats whether a run is hung, and says where each rank is."""

import os
from collections import defaultdict
from collections.abc import Iterable

from megarl.observe import terminal

# Phases in which a role's ranks wait for nobody but each other. In others they wait for other roles, too.
COMPUTING = frozenset(
    {"advantages", "judge", "logprobs", "offload", "probe", "read", "rollout", "score", "update", "values"}
)
COLLECTIVES = os.path.join("torch", "distributed", "distributed_c10d.py")
MAX_ROWS = 64  # of the table


def where(frame) -> str:
    """A thread's position: 'all_reduce at megarl/comm/exchange.py:57', or without a collective 'at file:line, name'."""
    collective, caller = None, None
    while frame is not None:
        file = frame.f_code.co_filename
        if file.endswith(COLLECTIVES):
            collective = frame.f_code.co_name  # the outermost of them: the one that was called
        elif caller is None and f"{os.sep}torch{os.sep}" not in file and not file.endswith(("contextlib.py",)):
            caller = (file, frame.f_lineno, frame.f_code.co_name)
            break
        frame = frame.f_back
    if caller is None:
        return collective or "unknown"
    position = f"{os.path.join(*caller[0].split(os.sep)[-3:])}:{caller[1]}"
    return f"{collective} at {position}" if collective else f"at {position}, {caller[2]}"


def is_in_collective(state: dict) -> bool:
    """Whether a rank's state shows it inside a collective's call."""
    return not state["where"].startswith("at ")


class Watch:
    """The latest state of each rank, and how long it has been unchanged by this process's clock."""

    def __init__(self, limit: float, now: float):
        """`limit`: seconds without progress; `now`: of a monotonic clock."""
        self._limit, self._now, self._start = limit, now, now
        self._states: dict[int, dict] = {}
        self._heard: dict[int, float] = {}  # when the rank's heartbeat came
        self._progressed: dict[int, float] = {}
        self.has_all = False  # whether all ranks asked for have been heard

    def update(self, states: dict[int, dict], now: float):
        """Takes new states by rank."""
        self._now = now
        for rank, state in states.items():
            known = self._states.get(rank, {})
            if state["beat"] != known.get("beat"):
                self._heard[rank] = now
            if (state["progress"], state["done"]) != (known.get("progress"), known.get("done")):
                self._progressed[rank] = now
            self._states[rank] = state

    def is_done(self, rank: int) -> bool:
        """Whether a rank has ended its work."""
        return rank in self._states and self._states[rank]["done"]

    def silence(self, rank: int, patience: float = 0.0) -> str | None:
        """The problem that a rank has sent no heartbeat for the limit and `patience` seconds; None if there is none."""
        seconds = self._now - self._heard.get(rank, self._start)
        if self.is_done(rank) or seconds < self._limit + patience:
            return None
        what = "is gone, stopped, or holds the interpreter's lock"
        return f"rank {rank} ({self._phase(rank)}) has sent no heartbeat for {seconds:.0f} s: its process {what}"

    def problem(self, ranks: Iterable[int]) -> str | None:
        """Why the run is hung, in one line; None if it is not."""
        ranks = list(ranks)
        for rank in ranks:
            if silence := self.silence(rank):
                return silence
        self.has_all = len(self._states) == len(ranks)
        busy = [rank for rank in ranks if not self.is_done(rank)]
        if busy and all(map(self._is_stuck, busy)):
            return f"no rank has made progress for {min(map(self._seconds, busy)):.0f} s{self._suspects(busy)}"
        computing = defaultdict(list)
        for rank in busy:
            state = self._states.get(rank)
            if state and state["phase"] in COMPUTING:
                computing[state["role"], state["phase"]].append(rank)
        for (role, phase), members in computing.items():
            if all(map(self._is_stuck, members)):
                seconds = min(map(self._seconds, members))
                return f"no rank in {role}/{phase} has made progress for {seconds:.0f} s{self._suspects(members)}"
        return None

    def table(self, ranks: Iterable[int]) -> list[str]:
        """A line per rank: role and phase, step, seconds without progress, collectives so far and position.

        Of more than `MAX_ROWS` ranks those outside of collectives come first, the others are only counted.
        """
        ranks = sorted(ranks, key=lambda rank: (rank in self._states and is_in_collective(self._states[rank]), rank))
        shown = sorted(ranks[:MAX_ROWS])
        rows = [["rank", "role/phase", "step", "seconds", "collectives", "position"]]
        for rank in shown:
            state = self._states.get(rank, {"step": "-", "collectives": "-", "where": "never heard of"})
            cells = (rank, self._phase(rank), state["step"], f"{self._seconds(rank):.0f}", state["collectives"])
            rows.append([*map(str, cells), "ended its work" if self.is_done(rank) else state["where"]])
        lines = [f"  {line}" for line in terminal.table(rows)]
        return lines + [f"  … and {len(ranks) - len(shown)} more ranks"] * (len(ranks) > len(shown))

    def rows(self, ranks: Iterable[int]) -> list[list]:
        """For `status.json`, by rank: [role, phase, step, seconds in this phase, seconds without progress, whether it
        has ended its work]; [] for a rank that has not been heard of."""
        return [self._row(rank) for rank in ranks]

    def _row(self, rank: int) -> list:
        if rank not in self._states:
            return []
        state = self._states[rank]
        inside = state["seconds"] + self._now - self._heard[rank]
        return [state["role"], state["phase"], state["step"], round(inside, 3), round(self._seconds(rank), 3),
                state["done"]]  # fmt: skip

    def _suspects(self, ranks: list[int]) -> str:
        """Which of the ranks do not wait for others."""
        working = [rank for rank in ranks if rank not in self._states or not is_in_collective(self._states[rank])]
        if not working or len(working) > 8:
            return ""
        return "; not in a collective: " + ", ".join(f"rank {rank} ({self._phase(rank)})" for rank in working)

    def _phase(self, rank: int) -> str:
        state = self._states.get(rank)
        if state is None:
            return "set-up"
        if not state["phase"]:
            return "between phases" if state["step"] else "set-up"
        return f"{state['role']}/{state['phase']}"

    def _seconds(self, rank: int) -> float:
        return self._now - self._progressed.get(rank, self._start)

    def _is_stuck(self, rank: int) -> bool:
        return self._seconds(rank) >= self._limit
