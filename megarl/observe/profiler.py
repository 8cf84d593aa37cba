"""Profiles of single steps (`--profile-steps`): a Chrome trace and a table of operators per phase, for each rank.

`DIR/profile/step_N_rank_R_ROLES.json.gz` is read by Perfetto or chrome://tracing. The phases of `Timers` are ranges in
it, `actor/update` and so on. `….txt` beside it lists the operators that took most time in each phase.
"""

import contextlib
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from megarl.observe.files import write_atomically
from megarl.observe.timers import Timers

FOLDER = "profile"
ROWS = 10  # operators of a phase in the table
OUTSIDE = "(between phases)"


class StepProfiler:
    """Profiles the steps that a rank is asked to profile; costs nothing in others."""

    def __init__(self, folder: Path, steps: range, rank: int, roles: list[str], timers: Timers, memory: bool):
        """
        Args:
            folder: the run's folder.
            roles: of this rank, for the names of the files.
            memory: also record the memory that operators allocate.
        """
        self.folder, self.steps, self.timers, self.memory = folder / FOLDER, steps, timers, memory
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it would print lines about itself, and errors without a GPU
        self._name = f"rank_{rank}_{'-'.join(roles) or 'idle'}"

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Profiles the body, and writes trace and table, if the step is one of those to profile."""
        if step not in self.steps:
            yield
            return
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
        profile = torch.profiler.profile(activities=activities, profile_memory=self.memory)
        with profile, self.timers.annotated(torch.profiler.record_function) as phases:
            yield
        self.folder.mkdir(parents=True, exist_ok=True)
        stem = f"step_{step}_{self._name}"
        profile.export_chrome_trace(str(self.folder / f"{stem}.json.gz"))
        write_atomically(self.folder / f"{stem}.txt", table(profile.events(), phases, self.memory))


def table(events, phases: set[str], memory: bool = False) -> str:
    """The operators of each phase that took most time by themselves, as text; phases in order of their time.

    Args:
        events: torch's `FunctionEvent`s.
        phases: names of the phases' ranges. An operator belongs to the innermost one that is open when it begins, on
            whatever thread it runs.
        memory: with a column of the memory that it allocated, less what it freed.
    """
    found: defaultdict[str, defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(lambda: [0, 0.0, 0.0, 0]))
    # A kernel's time is in the operator that started it; a GPU's own events would count it twice.
    events = [event for event in events if event.device_type == DeviceType.CPU]
    # Phases lie one inside the other, so the innermost that is open when an operator begins is the last on a stack.
    events.sort(key=lambda event: (event.time_range.start, event.name not in phases, -event.time_range.end))
    opened: list = []
    for event in events:
        while opened and opened[-1].time_range.end <= event.time_range.start:
            opened.pop()
        if event.name in phases:
            opened.append(event)
        else:
            row = found[opened[-1].name if opened else OUTSIDE][event.name]
            row[0] += 1
            row[1] += event.self_cpu_time_total
            row[2] += event.self_device_time_total
            row[3] += event.self_cpu_memory_usage + event.self_device_memory_usage
    lines = []
    for phase, rows in sorted(found.items(), key=lambda item: -_time(item[1].values())):
        lines += [f"{phase}: {_time(rows.values()) / 1e3:.2f} ms in {sum(row[0] for row in rows.values())} calls"]
        ranked = sorted(rows.items(), key=lambda item: -_time([item[1]]))
        lines += _aligned([_cells(name, row, memory) for name, row in ranked[:ROWS]], memory)
        lines += [f"  … and {len(ranked) - ROWS} more operators"] * (len(ranked) > ROWS)
    return "\n".join(lines) + "\n"


def _time(rows) -> float:
    """Microseconds of rows on CPU and device together."""
    return sum(row[1] + row[2] for row in rows)


def _cells(name: str, row: list[float], memory: bool) -> list[str]:
    calls, cpu, device, allocated = row
    cells = [f"{cpu / 1e3:.2f}", f"{device / 1e3:.2f}", str(calls)]
    return [*cells, *([f"{allocated / 2**20:.2f}"] if memory else []), name]


def _aligned(rows: list[list[str]], memory: bool) -> list[str]:
    rows = [["CPU ms", "device ms", "calls", *(["MiB"] if memory else []), "operator"], *rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  " + "  ".join([*(cell.rjust(width) for cell, width in zip(row[:-1], widths, strict=False)), row[-1]])
        for row in rows
    ]
