#!/usr/bin/env python3
"""Shows a running training in the terminal, from the files of its folder alone: no port, also over NFS or ssh.

    python tools/watch.py runs/mine              a frame every 2 s until the run has ended
    python tools/watch.py runs/mine --once       one frame
    python tools/watch.py runs/one runs/two      a line for each run

Steps and metrics are those of metrics.jsonl, roles those of settings.yaml. What every rank does is in status.json,
which rank 0 writes about every 2 s (docs/monitoring.md). Without a terminal frames are printed one after another. Exit
status: 0; 1 if a run is hung, has failed or gives no sign of life; 2 for wrong input.
"""

import math
import shutil
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megarl.errors import ArgumentParser, UsageError, refuses_in_one_line  # noqa: E402
from megarl.observe.status_file import ENDED, RUNNING  # noqa: E402
from megarl.observe.terminal import (  # noqa: E402  # noqa: E402
    AVERAGED_STEPS,
    REWARD_FIELDS,
    RL_FIELDS,
    SFT_FIELDS,
    format_bytes,
    format_duration,
    printable,
    table,
)
from tools._run_reader import RunReader  # noqa: E402

HOME, CLEAR_LINE, CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"
HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
MORE_FIELDS = (
    ("log-prob gap", "rollout/logprob_gap_max", ".3g"),
    ("response length", "rollout/response_length_mean", ".1f"),
    *(("gradient norm", f"{name}/grad_norm", ".3g") for name in ("actor", "sft", "reward")),
    ("tokens/s", "perf/tokens_per_s", ",.0f"),
    ("seconds", "time/step_s", ".2f"),
    ("idle", "time/idle_fraction", ".0%"),
)
BARS = "▁▂▃▄▅▆▇█"  # of a sparkline
BAR, LINE = 30, 40  # characters of the progress bar, and of a sparkline
PHASES = 4  # shown of a role
STUCK_RANKS = 8  # shown
STUCK = (10.0, 0.1)  # a rank is shown as stuck after so many seconds, or this part of the run's limit


def sparkline(values: Sequence[float | None], width: int) -> str:
    """The last `width` values as bars between the smallest and the largest of them; a space where one is missing."""
    shown = [value if value is not None and math.isfinite(value) else None for value in values[-width:]]
    known = [value for value in shown if value is not None]
    if not known:
        return ""
    low, high = min(known), max(known)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(" " if value is None else BARS[round((value - low) * scale)] for value in shown)


def progress_bar(fraction: float, width: int) -> str:
    """`[#####-----]` with `width` characters inside."""
    filled = round(min(max(fraction, 0.0), 1.0) * width)
    return f"[{'#' * filled}{'-' * (width - filled)}]"


def fields_of(run: RunReader) -> tuple:
    """(label, metric, format) of the metrics to show: those of the program that writes the run."""
    names = {name for row in run.rows for name in row}
    kinds = (RL_FIELDS, SFT_FIELDS, REWARD_FIELDS)
    return (*next((fields for fields in kinds if fields[0][1] in names), RL_FIELDS), *MORE_FIELDS)


def eta(run: RunReader) -> str:
    """Time left by the mean of the last steps; empty if it cannot be told."""
    seconds = [value for value in run.values("time/step_s")[-AVERAGED_STEPS:] if value is not None]
    if not seconds or not run.total_steps or run.step >= run.total_steps:
        return ""
    return f"ETA {format_duration(sum(seconds) / len(seconds) * (run.total_steps - run.step))}"


def headline(run: RunReader) -> str:
    """`step 12/200 [##---] 6 % ETA 3m48s`."""
    if not run.total_steps:
        return f"step {run.step}"
    fraction = run.step / run.total_steps
    bar = progress_bar(fraction, BAR)
    return f"step {run.step}/{run.total_steps} {bar} {fraction:.0%}  {eta(run)}".rstrip()


def state_line(run: RunReader) -> str:
    """Whether the run is alive, in words."""
    status, age = run.status, run.age
    if status is None:
        return run.problem or "no status.json: the run has not started, or an older version writes it"
    where = f"{len(status['ranks'])} ranks, rank 0 on {printable(status['host'])}"
    if status["state"] == ENDED:
        return f"ended ({where})"
    if status["state"] != RUNNING:
        reason = status["problem"] or "rank 0 ended with an error; its last lines say which"
        return f"{printable(status['state'])}: {printable(reason)}"
    if not run.is_alive():
        gone = f"no sign of life for {format_duration(age)}: its processes are gone or stopped ({where})"
        return f"{gone}; if they are gone, resume with --load {printable(run.folder)}"
    return f"running for {format_duration(status['uptime'])} on {where}"


def is_healthy(run: RunReader) -> bool:
    """Whether the run has ended well, or goes on."""
    return run.status is None or run.status["state"] == ENDED or run.status["state"] == RUNNING and run.is_alive()


def metric_lines(run: RunReader) -> list[str]:
    """A line per metric: label, last value, its course."""
    rows = []
    for label, name, form in fields_of(run):
        values = run.values(name)
        known = [value for value in values if value is not None]
        if not known:
            continue
        if name.startswith("eval/"):
            best = max(known) if "loss" not in name else min(known)
            rows.append([label, f"{known[-1]:{form}}", f"{sparkline(known, LINE)}  best {best:{form}}"])
        else:
            rows.append([label, f"{known[-1]:{form}}", sparkline(values, LINE)])
    memory = {name.split("/", 1)[1]: run.last(name) for name in run.names("memory/")}
    rows += [[printable(f"memory {name}"), format_bytes(value), ""] for name, value in memory.items() if value]
    if skipped := run.last("steps_skipped"):
        rows.append(["steps skipped", f"{skipped:.0f}", ""])
    return table(rows) if rows else ["no step has ended yet"]


def phase_of(row: list) -> str:
    """What a rank of status.json does."""
    if not row:
        return "not heard of yet"
    role, phase, step, _, _, done = row
    if done:
        return "ended its work"
    return f"{role}/{phase}" if phase else "between phases" if step else "set-up"


def role_lines(run: RunReader) -> list[str]:
    """A table of the roles: in which phases their ranks are, on how many ranks, and since when."""
    ranks = run.status["ranks"]
    by_ranks: dict[range, list[str]] = {}
    for role, of_role in (run.roles or {"all": range(len(ranks))}).items():
        by_ranks.setdefault(range(of_role.start, min(of_role.stop, len(ranks))), []).append(role)
    rows = [["roles", "ranks", "phase", "step", "on ranks", "seconds"]]
    for of_role, names in by_ranks.items():
        phases = Counter((phase_of(ranks[rank]), ranks[rank][2] if ranks[rank] else 0) for rank in of_role)
        label = [printable(", ".join(names)), f"{of_role.start}-{of_role.stop - 1}"]
        for (phase, step), count in phases.most_common(PHASES):
            seconds = [
                row[3] for row in map(ranks.__getitem__, of_role) if row and (phase_of(row), row[2]) == (phase, step)
            ]
            longest = f"{max(seconds) + run.age:.1f}" if seconds else ""
            rows.append([*label, printable(phase), str(step), str(count), longest])
            label = ["", ""]
        if len(phases) > PHASES:
            rows.append(["", "", f"and {len(phases) - PHASES} other phases", "", "", ""])
    return table(rows, right=3)


def stuck_lines(run: RunReader) -> list[str]:
    """The ranks that make no progress, the longest first."""
    limit = run.status["limit"]
    least = max(STUCK[0], STUCK[1] * limit)
    found = [
        (row[4], rank, row) for rank, row in enumerate(run.status["ranks"]) if row and row[4] >= least and not row[5]
    ]
    end = f"the run ends when a whole role has made none for {limit:.0f} s"
    lines = [
        f"rank {rank} ({printable(phase_of(row))}, step {row[2]}): no progress for {seconds:.0f} s; {end}"
        for seconds, rank, row in sorted(found, key=lambda item: (-item[0], item[1]))[:STUCK_RANKS]
    ]
    return lines + [f"and {len(found) - STUCK_RANKS} more ranks"] * (len(found) > STUCK_RANKS)


def frame(run: RunReader) -> list[str]:
    """All lines about one run."""
    lines = [f"{printable(run.folder)}  {headline(run)}", state_line(run), "", *metric_lines(run)]
    if run.status is not None and run.status["state"] != ENDED and run.status["ranks"]:
        lines += ["", *role_lines(run), *stuck_lines(run)]
    return lines


def overview(runs: list[RunReader]) -> list[str]:
    """A line per run."""
    rows = []
    for run in runs:
        label, name, form = fields_of(run)[0]
        values = run.values(name)
        last = run.last(name)
        metric = "" if last is None else f"{label} {last:{form}}"
        state = run.status["state"] if run.status else "unknown"
        state = "silent" if state == RUNNING and not run.is_alive() else state
        bar = progress_bar(run.step / run.total_steps, 10) if run.total_steps else ""
        steps = f"{run.step}/{run.total_steps or '?'}"
        rows.append([printable(run.folder), printable(state), steps, bar, metric, sparkline(values, 20), eta(run)])
    return table(rows)


def fit(lines: list[str], size: tuple[int, int] | None) -> list[str]:
    """The lines cut to a terminal's width and height."""
    if size is None:
        return lines
    columns, height = size
    return [line[:columns] for line in lines[: max(1, height - 1)]]


def show(runs: list[RunReader], once: bool, interval: float) -> int:
    """Prints frames until all runs have ended; returns the exit status."""
    is_terminal = sys.stdout.isatty() and not once
    if is_terminal:
        print(HIDE_CURSOR + HOME + CLEAR_BELOW, end="")
    try:
        while True:
            for run in runs:
                run.update()
            size: Any = tuple(shutil.get_terminal_size()) if sys.stdout.isatty() else None
            lines = fit(frame(runs[0]) if len(runs) == 1 else overview(runs), size)
            if is_terminal:
                print(HOME + "".join(f"{line}{CLEAR_LINE}\n" for line in lines) + CLEAR_BELOW, end="", flush=True)
            else:
                print("\n".join(lines) + ("" if once else "\n"), flush=True)
            if once or all(run.has_ended for run in runs):
                return int(not all(map(is_healthy, runs)))
            time.sleep(interval)
    except KeyboardInterrupt:
        return 0
    except BrokenPipeError:  # `watch.py … | head`
        sys.stdout = None
        return 0
    finally:
        if is_terminal:
            print(SHOW_CURSOR, end="", flush=True)


@refuses_in_one_line("watch")
def main(argv: list[str]) -> int:
    """Returns the exit status."""
    parser = ArgumentParser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folders of runs (--save)")
    parser.add_argument("--once", action="store_true", help="print one frame and exit")
    parser.add_argument("--interval", type=float, default=2.0, metavar="S", help="seconds between frames; default: 2")
    options = parser.parse_args(argv)
    if not 0.1 <= options.interval <= 3600:
        raise UsageError(f"--interval {options.interval}: allowed is 0.1 to 3600")
    runs = [RunReader(Path(path)) for path in options.runs]
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]  # a text stream of the interpreter
    return show(runs, options.once, options.interval)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
