"""The figure of a report: its panels, missing metrics."""

import struct

import pytest

from megarl.observe.metrics_file import series
from megarl.observe.report_figure import draw_report

FULL = {
    "reward/mean": 0.5, "reward/std": 0.2, "eval/accuracy": 0.4, "kl/reference": 0.01, "kl/coefficient": 0.05,
    "rollout/response_length_mean": 4.0, "actor/loss": -0.01, "critic/loss": 0.2, "rollout/logprob_gap_max": 1e-6,
}  # fmt: skip


def _panel_texts(rows, monkeypatch):
    """{panel title: texts in it} of the figure that draw_report makes."""
    from matplotlib.figure import Figure

    figures = []
    savefig = Figure.savefig

    def keep(figure, *args, **kwargs):
        figures.append(figure)
        return savefig(figure, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", keep)
    png = draw_report(rows, "title")
    height = 1485 if any("router/load_imbalance" in row for row in rows) else 990
    assert png.startswith(b"\x89PNG") and struct.unpack(">II", png[16:24]) == (1650, height)
    panels = {axes.get_title(loc="left"): axes for axes in figures[0].axes}
    return {title: [text.get_text() for text in axes.texts] for title, axes in panels.items() if title}, panels


def test_missing_metrics_say_so_panel_by_panel(monkeypatch):
    texts, _ = _panel_texts([{"step": 1, "actor/entropy": 1.0}], monkeypatch)
    assert len(texts) == 6 and all(words == ["not recorded"] for words in texts.values())
    rows = [{"step": 0, "eval/accuracy": 0.25}, {"step": 1, **FULL, "eval/accuracy": 0.75}]
    texts, _ = _panel_texts(rows, monkeypatch)
    assert texts.pop("Held-out accuracy") == ["0.250", "0.750"]
    assert len(texts) == 5 and not any(texts.values())


@pytest.mark.parametrize("gaps", [[0.0, 0.0], [0.0, 3e-7], [1e-12, 50.0], [3.1e-6, 3.1e-6]])
def test_gap_panel_shows_zeros_and_a_power_of_ten(gaps, monkeypatch):
    rows = [{"step": step, "rollout/logprob_gap_max": gap} for step, gap in enumerate(gaps)]
    _, panels = _panel_texts(rows, monkeypatch)
    axes = panels["Log-prob gap: max |rollout − recomputed|"]
    low, high = axes.get_ylim()
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert any("10^" in label for label in labels) == (max(gaps) > 0) and any("0" in label for label in labels)
    points = axes.lines[0].get_ydata()
    assert len(points) == len(gaps) and all(low < point < high for point in points)


def test_moe_runs_have_their_own_panels(monkeypatch):
    """One line per layer; the probe's gaps if there are any, and "not recorded" without replay."""
    row = {"router/load_imbalance": 0.5, "router/load_imbalance/layer_002": 0.4, "router/load_imbalance/layer_010": 0.6}
    texts, panels = _panel_texts([{"step": step, **FULL, **row} for step in (1, 2)], monkeypatch)
    assert len(panels["Load imbalance"].lines) == 3
    assert texts["Disagreement"] == texts["Mean log-prob gap"] == ["not recorded"]
    replay = {"router/disagreement": 0.1, "router/disagreement/layer_002": 0.1}
    probe = {"router/gap_replayed": 0.0, "router/gap_live": 1e-3}
    rows = [{"step": 1, **FULL, **row, **replay}, {"step": 2, **FULL, **row, **replay, **probe}]
    _, panels = _panel_texts(rows, monkeypatch)
    assert len(panels["Disagreement"].lines) == 2
    assert [line.get_ydata().tolist() for line in panels["Mean log-prob gap"].lines] == [[0.0], [1e-3]]


def test_values_that_were_not_finite_are_left_out():
    rows = [{"step": 1, "kl": 0.0}, {"step": 2, "kl": None}, {"step": 3}, {"step": 4, "kl": 2.0}]
    assert series(rows, "kl") == ([1, 4], [0.0, 2.0])
    draw_report([{"step": 1, **dict.fromkeys(FULL)}, {"step": 2, **FULL, "reward/std": None}], "nulls")


def test_reward_components_have_their_own_lines(monkeypatch):
    rows = [{**FULL, "step": step, "reward/model/mean": 1.5, "reward/m:f/mean": 0.5} for step in range(3)]
    _, panels = _panel_texts(rows, monkeypatch)
    labels = [text.get_text() for text in panels["Reward (mean ± standard deviation)"].get_legend().get_texts()]
    assert labels == ["reward", "m:f", "model"]
    alone = [{**FULL, "step": step, "reward/exact-match/mean": 0.5} for step in range(3)]
    assert _panel_texts(alone, monkeypatch)[1]["Reward (mean ± standard deviation)"].get_legend() is None
