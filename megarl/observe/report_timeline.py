"""The time line of a report: what each rank did in the last steps, and how each role divides a step."""

import json
from collections import defaultdict
from pathlib import Path
from statistics import fmean

from megarl.errors import UsageError
from megarl.observe.timeline import STEP_CATEGORY
from megarl.observe.timers import IDLE_PHASES

STEPS = 5  # shown at most
EVENTS = 8_000  # shown at most; fewer steps if they have more, but at least one
ROWS = 16  # a row for each rank up to this many ranks; above, one for each set of roles
AVERAGED_STEPS = 20


def timeline(path: Path, ranks_of_roles: dict[str, range]) -> dict | None:
    """The last steps in a run's timeline.json; None without a complete step.

    `{"names", "idle", "steps", "rows"}`: `names` of the phases as role/phase; `idle`: indices of those that only wait;
    `steps`: [[step, start, end]] of rank 0 in milliseconds; `rows`: `{"label", "events"}` with
    [[index of the name, start, duration, depth]], milliseconds, outer phases first. Only `shown` of `ranks` ranks have
    a row: all, or of each set of roles the first.

    Raises UsageError for a file that is not a trace of megarl.
    """
    events = _events(path)
    steps = [event for event in events.get(0, []) if event["cat"] == STEP_CATEGORY]
    if not steps:
        return None
    shown = _chosen_ranks(sorted(events), ranks_of_roles)
    for count in range(min(STEPS, len(steps)), 0, -1):
        start, end = steps[-count]["ts"], max(step["ts"] + step["dur"] for step in steps)
        inside = {rank: [e for e in events[rank] if _is_inside(e, start, end)] for rank in shown}
        if sum(map(len, inside.values())) <= EVENTS:
            break
    names = sorted({event["name"] for of_rank in inside.values() for event in of_rank})
    index = {name: number for number, name in enumerate(names)}
    rows = [{"label": label, "events": _nested(inside[rank], index, start)} for rank, label in shown.items()]
    return {
        "names": names,
        "idle": [index[name] for name in names if name.partition("/")[2] in IDLE_PHASES],
        "steps": [[e["name"].removeprefix("step "), _ms(e["ts"] - start), _ms(e["ts"] + e["dur"] - start)]
                  for e in steps[-count:]],
        "rows": rows,
        "ranks": len(events),
    }  # fmt: skip


def _events(path: Path) -> dict[int, list[dict]]:
    """The events of a trace file by rank, in order of their starts."""
    try:
        trace, found = json.loads(path.read_bytes()), defaultdict(list)
        for event in trace["traceEvents"]:
            if event["ph"] == "X":
                found[int(event["tid"])].append(
                    {
                        "name": str(event["name"]),
                        "cat": event["cat"],
                        "ts": float(event["ts"]),
                        "dur": float(event["dur"]),
                    }
                )
    except (ValueError, KeyError, TypeError):
        raise UsageError(f"{path} is not a time line that a run of megarl wrote") from None
    for events in found.values():
        events.sort(key=lambda event: (event["ts"], -event["dur"]))
    return found


def _chosen_ranks(ranks: list[int], ranks_of_roles: dict[str, range]) -> dict[int, str]:
    """The ranks with a row, and its label."""
    roles = {rank: [role for role, of_role in ranks_of_roles.items() if rank in of_role] for rank in ranks}
    if len(ranks) <= ROWS:
        return {rank: f"rank {rank}: {', '.join(roles[rank])}".removesuffix(": ") for rank in ranks}
    groups = defaultdict(list)
    for rank in ranks:
        groups[tuple(roles[rank])].append(rank)
    chosen = list(groups.items())[:ROWS]
    return {
        of_set[0]: f"rank {of_set[0]} of {len(of_set)}: {', '.join(names) or 'no role'}" for names, of_set in chosen
    }


def _is_inside(event: dict, start: float, end: float) -> bool:
    return event["cat"] != STEP_CATEGORY and event["ts"] >= start and event["ts"] < end and event["dur"] > 0


def _nested(events: list[dict], index: dict[str, int], origin: float) -> list[list]:
    """[[name, start, duration, depth]]: a phase inside another one is one deeper."""
    found, ends = [], []
    for event in events:
        while ends and event["ts"] >= ends[-1]:
            ends.pop()
        found.append([index[event["name"]], _ms(event["ts"] - origin), _ms(event["dur"]), len(ends)])
        ends.append(event["ts"] + event["dur"])
    return found


def _ms(microseconds: float) -> float:
    return round(microseconds / 1e3, 3)


def shares(rows: list[dict]) -> dict:
    """How a step divides, means over the last `AVERAGED_STEPS` steps: `{"steps", "step_s", "idle", "roles"}`, of each
    role `{"idle", "phases": {name: seconds}}`. An `idle` fraction is that of the ranks' time, or null."""
    recent = [row for row in rows if row.get("time/step_s") is not None][-AVERAGED_STEPS:]
    roles: dict[str, dict] = {}
    for name in sorted({name for row in recent for name in row if name.startswith("time/")}):
        _, *role, phase = name.split("/")
        if not role:
            continue
        of_role = roles.setdefault("/".join(role), {"idle": None, "phases": {}})
        # A phase that most steps do not have, such as an evaluation, counts by its share of the steps.
        mean = fmean(row.get(name) or 0.0 for row in recent)
        if phase == "idle_fraction":
            of_role["idle"] = mean
        else:
            of_role["phases"][phase.removesuffix("_s")] = mean
    return {
        "steps": len(recent),
        "step_s": fmean(row["time/step_s"] for row in recent) if recent else None,
        "idle": fmean(row.get("time/idle_fraction") or 0.0 for row in recent) if recent else None,
        "roles": roles,
    }
