"""What a report shows of a run: reduced curves, and figures at the top."""

import json
import math
import random

from megarl.extras import report_curves
from megarl.extras.report import embedded_json
from megarl.extras.report_curves import best_index, curves


def test_short_curves_keep_every_bit():
    rows = [{"step": 0, "eval": 0.1}, {"step": 1, "a": 1 / 3, "b": 2}, {"step": 5, "a": None, "b": 1e-300, "eval": 0.2}]
    found = curves(rows)
    metrics, grids = found["metrics"], found["grids"]
    assert list(metrics) == ["a", "b", "eval"] and [metrics[name]["y"] for name in metrics] == [
        [1 / 3, None], [2, 1e-300], [0.1, 0.2],
    ]  # fmt: skip
    assert metrics["a"]["grid"] == metrics["b"]["grid"] != metrics["eval"]["grid"]  # equal steps are stored once
    assert [grids[metrics[name]["grid"]]["to"] for name in ("a", "eval")] == [[1, 5], [0, 5]]
    assert metrics["a"]["lost"] == 1 and metrics["b"]["lost"] == 0


def test_long_curves_become_envelopes_without_losing_a_spike():
    """10,000 steps of 20 metrics, as a page below 0.6 MB."""
    draw = random.Random(1)
    rows = [{"step": step} | {f"g/{i}": draw.random() for i in range(20)} for step in range(1, 10_001)]
    rows[7_654]["g/7"], rows[8_000]["g/7"], rows[4_000]["g/8"] = 123.0, -5.0, None
    found = curves(rows)
    spiky, grid = found["metrics"]["g/7"], found["grids"][0]
    assert len(found["grids"]) == 1 and len(spiky["y"]) == len(grid["from"]) == report_curves.BUCKETS
    assert max(spiky["high"]) == spiky["max"] == 123.0 and min(spiky["low"]) == spiky["min"] == -5.0
    at = spiky["high"].index(123.0)
    assert grid["from"][at] <= 7_655 <= grid["to"][at]
    assert all(low <= mean <= high for low, mean, high in zip(spiky["low"], spiky["y"], spiky["high"], strict=True))
    assert grid["from"][0] == 1 and grid["to"][-1] == 10_000
    assert all(end + 1 == start for end, start in zip(grid["to"], grid["from"][1:], strict=False))
    assert found["metrics"]["g/8"]["lost"] == 1 and None not in found["metrics"]["g/8"]["y"]
    assert len(embedded_json(found)) < 600_000


def test_summary_of_each_metric():
    rows = [
        {"step": step, "eval/accuracy": accuracy, "critic/loss": loss, "actor/entropy": 1.0, "lost": None}
        for step, accuracy, loss in ((0, 0.25, 3.0), (5, 0.75, 1.0), (9, 0.5, 2.0))
    ]
    found = curves(rows)["metrics"]
    columns = ("first", "last", "best", "min", "max", "lost")
    assert {name: [metric[column] for column in columns] for name, metric in found.items()} == {
        "eval/accuracy": [0.25, 0.5, [5, 0.75], 0.25, 0.75, 0],
        "critic/loss": [3.0, 2.0, [5, 1.0], 1.0, 3.0, 0],
        "actor/entropy": [1.0, 1.0, None, 1.0, 1.0, 0],
        "lost": [None, None, None, None, None, 3],
    }


def test_direction_of_better():
    values = [2.0, 1.0, 3.0]
    assert best_index("rollout/tokens_per_s", values) == 2
    assert best_index("time/actor/update_s", values) == 1
    assert best_index("kl/coefficient", values) is None


def test_figures_at_the_top():
    rows = [{"step": 0, "eval/accuracy": 0.25}]
    rows += [{"step": i, "reward/mean": i / 10, "time/step_s": 30.0, "steps_skipped": i - 1} for i in (1, 2, 3)]
    settings = {"megarl": {"train_iters": 5}, "world_size": 2, "roles": {"actor": {}, "reward": {}},
                "environment": {"device": "GPU", "torch": "2.11", "megarl": "1.0", "git_commit": "a" * 40}}  # fmt: skip
    assert report_curves.facts(rows, settings) == [
        ["steps", "3 of 5", "runs, or ended early"],
        ["held-out accuracy", "0.25", ""],
        ["reward", "0.3", "from 0.1"],
        ["seconds per step", "30", "1m30s in 3 steps"],
        ["steps skipped", "2", "a loss or gradient was not finite, or over a limit"],
        ["ranks", "2", "actor, reward"],
        ["device", "GPU", ""],
        ["software", "megarl 1.0", "torch 2.11, commit aaaaaaaaaaaa"],
    ]
    assert report_curves.facts(rows, {})[0] == ["steps", "3", "from step 0"]
    assert json.loads(embedded_json(report_curves.facts([{"step": 4, "reward/mean": math.pi}], {})))[0][1] == "4"
