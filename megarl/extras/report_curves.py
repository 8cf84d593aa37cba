"""The numbers of a report: each metric of metrics.jsonl, reduced to a curve that a page can draw, with its extreme
values; and the figures at its top: how far the run is, what it reached, and on what it runs.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean

from megarl.observe.metrics_file import series
from megarl.observe.terminal import format_duration

# Better direction by metric name or its suffix; for all other metrics "best" is empty.
HIGHER_IS_BETTER = tuple(
    "/mean accuracy reward/margin explained_variance tokens_per_s router/replayed_fraction".split()
)
LOWER_IS_BETTER = tuple(
    """
    critic/loss sft/loss reward/loss eval/loss /failures cut_fraction rollout/logprob_gap_max
    rollout/logprob_gap_max_fresh rollout/logprob_gap_mean router/disagreement router/load_imbalance router/gap_live
    router/gap_replayed _s _bytes idle_fraction steps_skipped
    """.split()
)

MAX_POINTS = 800  # of a curve that is drawn point by point
BUCKETS = 400  # of a longer one, each with mean, smallest and largest value
DIGITS = 6  # significant ones of a bucket's mean


def best_index(name: str, values: Sequence[float]) -> int | None:
    """Index of the first best value, or None for a metric that has no better direction (entropy, a coefficient)."""
    # tokens_per_s also ends in _s like a time, so check HIGHER_IS_BETTER first.
    if name.endswith(HIGHER_IS_BETTER):
        return values.index(max(values))
    if name.endswith(LOWER_IS_BETTER):
        return values.index(min(values))
    return None


def curves(rows: Sequence[dict]) -> dict:
    """All metrics of a run: `{"grids": […], "metrics": {name: …}}`.

    A grid holds the steps of a curve's points, `{"from": [n], "to": [n]}`; they differ only if a point stands for
    several steps. Metrics of the same steps share one. A metric has the index of its `grid`, the values `y` [n] (null:
    not finite), for several steps a point their means with the smallest and largest values `low` and `high`, and of
    all steps the values `first`, `last`, `min`, `max`, `best` ([step, value] or null) and `lost` (not finite).

    rows: lines of metrics.jsonl from `read_metrics`.
    """
    grids: dict[tuple, int] = {}
    metrics = {}
    for name in sorted({key for row in rows for key in row} - {"step"}):
        points = [(row["step"], row[name]) for row in rows if name in row]
        metric = _reduced(points) if len(points) > MAX_POINTS else {"y": [value for _, value in points]}
        edges = metric.pop("edges", None) or [(step, step) for step, _ in points]
        grid = tuple(first for first, _ in edges), tuple(last for _, last in edges)
        metric["grid"] = grids.setdefault(grid, len(grids))
        metrics[name] = metric | _summary(name, points)
    return {"grids": [{"from": list(first), "to": list(last)} for first, last in grids], "metrics": metrics}


def _reduced(points: list[tuple[int, float | None]]) -> dict:
    """Mean, smallest and largest value of `BUCKETS` buckets of equally many points, and the steps of each."""
    bounds = [len(points) * i // BUCKETS for i in range(BUCKETS + 1)]
    found = {"edges": [], "y": [], "low": [], "high": []}
    for start, end in pairwise(bounds):
        values = [value for _, value in points[start:end] if value is not None]
        found["edges"].append((points[start][0], points[end - 1][0]))
        found["y"].append(_rounded(math.fsum(values) / len(values)) if values else None)
        found["low"].append(min(values) if values else None)
        found["high"].append(max(values) if values else None)
    for name in ("low", "high"):
        found[name] = [value if value is None else _rounded(value) for value in found[name]]
    return found


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def _summary(name: str, points: list[tuple[int, float | None]]) -> dict:
    finite = [(step, value) for step, value in points if value is not None]
    lost = len(points) - len(finite)
    if not finite:
        return dict.fromkeys(("first", "last", "min", "max", "best")) | {"lost": lost}
    values = [value for _, value in finite]
    best = best_index(name, values)
    found = {"first": values[0], "last": values[-1], "min": min(values), "max": max(values), "lost": lost}
    return found | {"best": None if best is None else list(finite[best])}


# (label, metric): first and last value.
RESULTS = {
    "held-out accuracy": "eval/accuracy",
    "reward": "reward/mean",
    "KL to reference": "kl/reference",
    "KL to teacher": "distill/reverse_kl",
    "response length": "rollout/response_length_mean",
    "fine-tuning loss": "sft/loss",
    "reward model's loss": "reward/loss",
    "held-out loss": "eval/loss",
}
SOFTWARE = (("megarl", "megarl"), ("megatron-core", "megatron_core"), ("torch", "torch"), ("python", "python"))
AVERAGED_STEPS = 20


def facts(rows: list[dict], settings: dict) -> list[list[str]]:
    """[[label, value, note]] of a run with at least one row; its settings may be empty."""
    found = [_steps(rows, settings)]
    for label, name in RESULTS.items():
        _, values = series(rows, name)
        if values:
            found.append([label, f"{values[-1]:.4g}", f"from {values[0]:.4g}" if len(values) > 1 else ""])
    _, seconds = series(rows, "time/step_s")
    if seconds:
        note = f"{format_duration(sum(seconds))} in {len(seconds)} steps"
        found.append(["seconds per step", f"{fmean(seconds[-AVERAGED_STEPS:]):.3g}", note])
    _, speeds = series(rows, "perf/tokens_per_s")
    if speeds:
        found.append(["tokens per second", f"{fmean(speeds[-AVERAGED_STEPS:]):,.0f}", "mean of the last steps"])
    skipped = next((row["steps_skipped"] for row in reversed(rows) if row.get("steps_skipped") is not None), None)
    if skipped:
        found.append(["steps skipped", str(skipped), "a loss or gradient was not finite, or over a limit"])
    return found + _machine(settings)


def _steps(rows: list[dict], settings: dict) -> list[str]:
    first, last = rows[0]["step"], rows[-1]["step"]
    planned = (settings.get("megarl") or {}).get("train_iters")
    note = f"{len(rows)} recorded" if len(rows) <= last - first else f"from step {first}"
    if not isinstance(planned, int):
        return ["steps", str(last), note]
    return ["steps", f"{last} of {planned}", note if last >= planned else "runs, or ended early"]


def _machine(settings: dict) -> list[list[str]]:
    environment, ranks = settings.get("environment") or {}, settings.get("world_size")
    roles = ", ".join(settings.get("roles") or {})
    found = [["ranks", str(ranks), roles]] if ranks else []
    if environment.get("device"):
        found.append(["device", str(environment["device"]), str(environment.get("platform") or "")])
    versions = [f"{label} {environment[name]}" for label, name in SOFTWARE if environment.get(name)]
    if versions:
        commit = environment.get("git_commit")
        found.append(["software", versions[0], ", ".join(versions[1:] + ([f"commit {commit[:12]}"] if commit else []))])
    return found
