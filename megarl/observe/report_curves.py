"""The curves of a report: each metric of metrics.jsonl, reduced to what a page can draw, and its extreme values."""

import math
from collections.abc import Sequence
from itertools import pairwise

# Better direction by metric name or its suffix; for all other metrics "best" is empty.
HIGHER_IS_BETTER = (
    "/mean", "accuracy", "reward/margin", "explained_variance", "tokens_per_s", "router/replayed_fraction"
)  # fmt: skip
LOWER_IS_BETTER = (
    "critic/loss", "sft/loss", "reward/loss", "eval/loss", "/failures", "cut_fraction", "rollout/logprob_gap_max",
    "rollout/logprob_gap_max_fresh",
    "rollout/logprob_gap_mean", "router/disagreement",
    "router/load_imbalance", "router/gap_live", "router/gap_replayed", "_s", "_bytes", "idle_fraction", "steps_skipped",
)  # fmt: skip

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


def curves(rows: list[dict]) -> dict:
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
        grid = tuple(map(tuple, zip(*edges, strict=True)))
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
    steps, values = zip(*finite, strict=True)
    best = best_index(name, values)
    return {
        "first": values[0],
        "last": values[-1],
        "min": min(values),
        "max": max(values),
        "best": None if best is None else [steps[best], values[best]],
        "lost": lost,
    }
