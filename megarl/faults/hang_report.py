"""A run that hangs: judges from the ranks' heartbeats whether it does, says where each rank is, and leaves files of it.

`DIR/hang/rank_R.txt` is for readers: what the rank did, Python stacks, the last collectives. `rank_R.json` has all
collectives that torch's flight recorder holds (TORCH_FR_BUFFER_SIZE, by default 2000), each with its Python frames;
`flight_recorder/fr_trace_R` is the same in the format that torch's program `torchfrtrace` reads.
"""

import contextlib
import faulthandler
import json
import os
import pickle
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megarl.deferred import torch
from megarl.observe.files import write_atomically
from megarl.observe.terminal import ranges_text, table

# Phases in which a role's ranks wait for nobody but each other. In others they wait for other roles, too.
COMPUTING = frozenset(
    {"advantages", "judge", "logprobs", "offload", "probe", "read", "rollout", "score", "update", "values"}
)
# Of these the phases that are made of many like pieces, so that one silence tells how long another may be.
REGULAR = frozenset({"logprobs", "rollout", "update", "values"})
KNOWN = 2  # steps in which such a phase must have ended before its silences are known: the first compiles and connects
USUAL = 20  # times the longest silence so far: no progress for so long is a hang
SHORTEST = 50.0  # seconds that a silence may always last
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
        self._skipped = 0.0
        self._longest: dict[tuple[str, str], float] = {}  # silence in a regular phase of a role
        self._steps: defaultdict[tuple[str, str], set[int]] = defaultdict(set)  # the first in which such a phase ended
        self._warned: set[tuple[str, str, int]] = set()
        self._states: dict[int, dict] = {}
        self._heard: dict[int, float] = {}  # when the rank's heartbeat came
        self._progressed: dict[int, float] = {}
        self.has_all = False  # whether all ranks asked for have been heard

    def update(self, states: dict[int, dict], now: float):
        """Takes new states by rank."""
        self._now = now = now - self._skipped
        for rank, state in states.items():
            known = self._states.get(rank, {})
            if state["beat"] != known.get("beat"):
                self._heard[rank] = now
            if (state["progress"], state["done"]) != (known.get("progress"), known.get("done")):
                if known.get("phase") in REGULAR:
                    self._learn(known, state, self._seconds(rank))
                self._progressed[rank] = now
            self._states[rank] = state

    def skip(self, seconds: float):
        """Takes seconds off the clock in which this process was stopped: a scheduler that suspends a job stops all."""
        self._skipped += seconds

    def _learn(self, before: dict, after: dict, silence: float):
        """Takes note of a silence of `silence` seconds that has ended in, or with, a regular phase."""
        phase = before["role"], before["phase"]
        self._longest[phase] = max(silence, self._longest.get(phase, 0.0))
        if phase != (after["role"], after["phase"]) and len(self._steps[phase]) < KNOWN:
            self._steps[phase].add(before["step"])

    def _limit_of(self, phase: tuple[str, str]) -> float:
        """Seconds that all ranks of a role in a computing phase may be silent."""
        if len(self._steps[phase]) < KNOWN:
            return self._limit
        return min(self._limit, max(SHORTEST, USUAL * self._longest[phase]))

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
        for phase, members in self._computing(busy).items():
            seconds, limit = min(map(self._seconds, members)), self._limit_of(phase)
            if seconds >= limit:
                usual = f" (the longest silence there was {self._longest[phase]:.1f} s)" if limit < self._limit else ""
                return f"{self._silent(phase, seconds)}{usual}{self._suspects(members)}"
        return None

    def warnings(self, ranks: Iterable[int]) -> list[str]:
        """A line for each role that has been silent for half of its limit, once in a step, if that is below the limit
        of all phases."""
        lines = []
        for phase, members in self._computing(rank for rank in ranks if not self.is_done(rank)).items():
            seconds, limit = min(map(self._seconds, members)), self._limit_of(phase)
            key = *phase, self._states[members[0]]["step"]
            if limit < self._limit and seconds >= limit / 2 and key not in self._warned:
                self._warned.add(key)
                lines.append(f"{self._silent(phase, seconds)}; the run ends if none does within {limit:.0f} s")
        return lines

    def _computing(self, ranks: Iterable[int]) -> dict[tuple[str, str], list[int]]:
        """The ranks by role and phase, of those that compute."""
        found = defaultdict(list)
        for rank in ranks:
            state = self._states.get(rank)
            if state and state["phase"] in COMPUTING:
                found[state["role"], state["phase"]].append(rank)
        return found

    @staticmethod
    def _silent(phase: tuple[str, str], seconds: float) -> str:
        return f"no rank in {'/'.join(phase)} has made progress for {seconds:.0f} s"

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
        lines = [f"  {line}" for line in table(rows)]
        return lines + [f"  … and {len(ranks) - len(shown)} more ranks"] * (len(ranks) > len(shown))

    def rows(self, ranks: Iterable[int]) -> list[list]:
        """For `status.json`, by rank: [role, phase, step, seconds in this phase, seconds without progress, whether it
        has ended its work]; [] for a rank that has not been heard of."""
        return [self._row(rank) for rank in ranks]

    def _row(self, rank: int) -> list:
        if rank not in self._states:
            return []
        state = self._states[rank]
        inside = round(state["seconds"] + self._now - self._heard[rank], 3)
        silent = round(self._seconds(rank), 3)
        return [state["role"], state["phase"], state["step"], inside, silent, state["done"]]

    def _suspects(self, ranks: list[int]) -> str:
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


FOLDER, RECORDER = "hang", "flight_recorder"
LAST = 12  # collectives in the text
RECORDER_SECONDS = 20.0  # longest time for the flight recorder, which may wait for locks of a hung thread


def write(folder: Path, rank: int, where: str):
    """Writes this rank's files into the run's folder, as far as it can: the run ends whatever happens here.

    `where`: what this rank does, in one line.
    """
    folder = folder / FOLDER
    with contextlib.suppress(OSError):
        (folder / RECORDER).mkdir(parents=True, exist_ok=True)
        path = folder / f"rank_{rank}.txt"
        with open(path, "w", encoding="utf-8") as file:
            file.write(f"rank {rank}, {time.strftime('%Y-%m-%d %H:%M:%S')}: {where}\n\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
        recorder = threading.Thread(target=_write_collectives, args=(folder, rank, path), daemon=True)
        recorder.start()
        recorder.join(RECORDER_SECONDS)


def _write_collectives(folder: Path, rank: int, path: Path):
    """Adds the last collectives to a rank's text, and writes all that are recorded."""
    recorded = _flight_recorder()
    if recorded is None:
        return
    dist = torch.distributed
    ranks = {name: dist.get_process_group_ranks(group) for group, name in dist.distributed_c10d._world.pg_names.items()}
    recorded["pg_config"] = {  # gloo names its groups otherwise than its collectives, so that torchfrtrace fails
        name: {"name": name, "desc": "", "ranks": str(members)} for name, members in ranks.items()
    }
    with contextlib.suppress(OSError):
        with open(path, "a", encoding="utf-8") as file:
            file.write("\n".join(["", *_lines(recorded.get("entries", []), ranks), ""]))
        write_atomically(folder / f"rank_{rank}.json", json.dumps(recorded, indent=1) + "\n")
        write_atomically(folder / RECORDER / f"fr_trace_{rank}", pickle.dumps(recorded, protocol=2))


def _flight_recorder() -> dict | None:
    """What torch has recorded for the backend in use; None if this torch records nothing."""
    from torch._C import _distributed_c10d as c10d

    dist = torch.distributed
    name = "_dump_nccl_trace" if dist.is_initialized() and dist.get_backend() == "nccl" else "_dump_fr_trace"
    dump = getattr(c10d, name, None)
    return None if dump is None else pickle.loads(dump())  # what torch has written in this process


def _lines(entries: list[dict], ranks: Mapping[Any, list[int]]) -> list[str]:
    rows = [["number", "collective", "state", "elements", "group", "its ranks"]]
    for entry in entries[-LAST:]:
        name = entry["process_group"][0]
        state = "ended" if entry["retired"] else "not ended"
        sizes = [*entry["input_sizes"], *entry["output_sizes"][:1]]
        number = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
        elements, members = sizes[0] if sizes else "-", ranges_text(ranks.get(name, [])) or "-"
        rows.append(list(map(str, (number, entry["profiling_name"], state, elements, name, members))))
    head = f"last {len(rows) - 1} of {len(entries)} recorded collectives, numbered within their group:"
    return [head, *table(rows)]
