"""The figure of a report: its panels, missing metrics."""

import json
import shutil
import struct
import subprocess
from itertools import pairwise

import pytest

from megarl.extras.report import PAGE
from megarl.extras.report_figure import draw_report, tick_texts
from megarl.observe.metrics_file import series
from tests.helpers.tiers import long
from tests.helpers.waiting import SAFETY_SECONDS

FULL = {
    "reward/mean": 0.5, "reward/std": 0.2, "eval/accuracy": 0.4, "kl/reference": 0.01, "kl/coefficient": 0.05,
    "rollout/response_length_mean": 4.0, "actor/loss": -0.01, "critic/loss": 0.2, "rollout/logprob_gap_max": 1e-6,
}  # fmt: skip


def drawn(rows, monkeypatch) -> list:
    """The axes of the figure that draw_report makes, without its layout and its pixels, which take long."""
    from matplotlib.figure import Figure

    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda each, *a, **k: figures.append(each))
    draw_report(rows, "title")
    return figures[0].axes


def _panel_texts(rows, monkeypatch):
    """({panel title: texts in it}, panels by title)."""
    panels = {axes.get_title(loc="left"): axes for axes in drawn(rows, monkeypatch)}
    return {title: [text.get_text() for text in axes.texts] for title, axes in panels.items() if title}, panels


def test_missing_metrics_say_so_panel_by_panel(monkeypatch):
    texts, _ = _panel_texts([{"step": 1, "actor/entropy": 1.0}], monkeypatch)
    assert len(texts) == 6 and all(words == ["not recorded"] for words in texts.values())
    rows = [{"step": 0, "eval/accuracy": 0.25}, {"step": 1, **FULL, "eval/accuracy": 0.75}]
    texts, _ = _panel_texts(rows, monkeypatch)
    assert texts.pop("Held-out accuracy") == ["0.250", "0.750"]
    assert len(texts) == 5 and not any(texts.values())


def test_a_run_without_a_reference_shows_the_kl_to_its_teacher(monkeypatch):
    rows = [{"step": step, "distill/reverse_kl": 0.5 / step, "distill/forward_kl": 0.4 / step} for step in (1, 2)]
    texts, panels = _panel_texts(rows, monkeypatch)
    assert "KL to reference" not in texts and texts["KL to teacher (nats per token)"] == []
    shown = panels["KL to teacher (nats per token)"].lines
    assert [list(line.get_ydata()) for line in shown] == [[0.5, 0.25], [0.4, 0.2]]


@pytest.mark.parametrize("gaps", [[0.0, 0.0], long([0.0, 3e-7]), [1e-12, 50.0], long([3.1e-6, 3.1e-6])])
def test_gap_panel_shows_zeros_and_a_power_of_ten(gaps, monkeypatch):
    rows = [{"step": step, "rollout/logprob_gap_max": gap} for step, gap in enumerate(gaps)]
    _, panels = _panel_texts(rows, monkeypatch)
    axes = panels["Log-prob gap: max |rollout − recomputed|"]
    low, high = axes.get_ylim()
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert any("10^" in label for label in labels) == (max(gaps) > 0) and any("0" in label for label in labels)
    points = axes.lines[0].get_ydata()
    assert len(points) == len(gaps) and all(low < point < high for point in points)


@pytest.mark.parametrize("staleness", [[0, 0], [0, 1.5]])
def test_the_gap_panel_shows_staleness(staleness, monkeypatch):
    rows = [{"step": i, **FULL, "rollout/staleness": value} for i, value in enumerate(staleness)]
    twins = [axes for axes in drawn(rows, monkeypatch) if axes.get_ylabel() == "staleness, updates"]
    assert [axes.lines[0].get_ydata().tolist() for axes in twins] == ([staleness] if any(staleness) else [])


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


def test_values_that_were_not_finite_are_left_out_of_the_picture():
    rows = [{"step": 1, "kl": 0.0}, {"step": 2, "kl": None}, {"step": 3}, {"step": 4, "kl": 2.0}]
    assert series(rows, "kl") == ([1, 4], [0.0, 2.0])
    rows = [{"step": 1, **dict.fromkeys(FULL)}, {"step": 2, **FULL, "reward/std": None}]
    for more, height in (({}, 990), ({"router/load_imbalance": 0.5}, 1485)):
        png = draw_report([*rows, {"step": 3, **more}], "nulls")
        assert png.startswith(b"\x89PNG") and struct.unpack(">II", png[16:24]) == (1650, height)


def test_reward_components_have_their_own_lines(monkeypatch):
    rows = [{**FULL, "step": step, "reward/model/mean": 1.5, "reward/m:f/mean": 0.5} for step in range(3)]
    _, panels = _panel_texts(rows, monkeypatch)
    labels = [text.get_text() for text in panels["Reward (mean ± standard deviation)"].get_legend().get_texts()]
    assert labels == ["reward", "m:f", "model"]
    alone = [{**FULL, "step": step, "reward/exact-match/mean": 0.5} for step in range(3)]
    assert _panel_texts(alone, monkeypatch)[1]["Reward (mean ± standard deviation)"].get_legend() is None


TICKS = [  # values of neighbouring ticks, and their texts
    ([0.69305, 0.6931, 0.69315, 0.6932], ["0.69305", "0.69310", "0.69315", "0.69320"]),
    ([0.0, 2e-7, 4e-7, 1e-6], ["0", "2e-7", "4e-7", "1e-6"]),
    ([1e-6, 1.00002e-6, 1.00004e-6], ["1.00000e-6", "1.00002e-6", "1.00004e-6"]),
    ([0.0, 50000.0, 100000.0, 250000.0], ["0", "50,000", "100,000", "250,000"]),
    ([1234567.0, 1234567.5, 1234568.0], ["1,234,567.0", "1,234,567.5", "1,234,568.0"]),
    ([0.0, 1e7, 2e7], ["0", "1e7", "2e7"]),
    ([-0.1, 2.7755575615628914e-17, 0.1, 0.30000000000000004], ["-0.1", "0", "0.1", "0.3"]),
    ([5.37], ["5.37"]), ([0.0], ["0"]), ([], []),
]  # fmt: skip


@pytest.mark.parametrize("values, texts", TICKS)
def test_ticks_have_the_digits_that_tell_them_apart(values, texts):
    assert tick_texts(values) == texts


def printed_by_node(program: str):
    """The JSON that a program prints."""
    done = subprocess.run(["node", "-e", program], capture_output=True, text=True, timeout=SAFETY_SECONDS)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.skipif(not shutil.which("node"), reason="needs node")
def test_the_page_writes_ticks_as_the_figure_does():
    cases = [values for values, _ in TICKS if values]
    size = 3 * 1024.0**3
    found, gaps, large, small = printed_by_node(f"""{(PAGE / "numbers.js").read_text(encoding="utf-8")}
    console.log(JSON.stringify([{json.dumps(cases)}.map(tickTexts), tickTexts([null, 0.5, 1]),
      byteTicks([{size}, {size} + 1024, {size} + 2048]), byteTicks([0, 512, 1024])]));
    """)
    assert found == [texts for values, texts in TICKS if values]
    assert gaps == ["", "0.5", "1.0"] and small == ["0 KiB", "0.5 KiB", "1.0 KiB"]
    assert len(set(large)) == 3 and all(text.endswith(" GiB") for text in large)


@pytest.mark.parametrize("steps, losses", [
    ((1, 2, 3), (0.6931, 0.6932, 0.6934)), ((1, 2), (1e-6, 1.00001e-6)), ((1, 100_000, 1_234_567), (0.5, 0.4, 0.3)),
])  # fmt: skip
def test_ticks_of_a_panel_are_complete_numbers_that_differ(steps, losses, monkeypatch):
    rows = [{"step": step, "sft/loss": loss} for step, loss in zip(steps, losses, strict=True)]
    _, panels = _panel_texts(rows, monkeypatch)
    panels["Losses"].figure.draw_without_rendering()
    for axis in (panels["Losses"].xaxis, panels["Losses"].yaxis):
        shown = [tick.label1 for tick in axis.get_major_ticks()]
        texts = [label.get_text() for label in shown]
        assert len(texts) > 2 and len(set(texts)) == len(texts) and axis.get_offset_text().get_text() == ""
        assert texts == [text.replace("-", "−") for text in tick_texts(axis.get_majorticklocs())]
    low, high = panels["Losses"].get_xlim()
    shown = [label for label in panels["Losses"].get_xticklabels() if low <= label.get_position()[0] <= high]
    boxes = [label.get_window_extent() for label in shown]
    assert len(boxes) > 1 and all(left.x1 < right.x0 for left, right in pairwise(boxes))


@pytest.mark.skipif(not shutil.which("node"), reason="needs node")
def test_the_page_draws_layers_and_staleness_each_in_one_picture():
    names = [
        "router/load/layer_002", "router/load/layer_010", "rollout/staleness_share_0", "rollout/staleness_share_1",
        "rollout/staleness", "correction/kl_k3", "correction/kl_k3_age_2", "environment/reward/a_age_3",
    ]  # fmt: skip
    source = (PAGE / "curves.js").read_text(encoding="utf-8").partition("function isConstant")[0]
    found = printed_by_node(f"""
    const DATA = {{run: {{metrics: {json.dumps(dict.fromkeys(names, 1))}}}}}, RUNS = [DATA.run], css = () => "";
    {source}
    console.log(JSON.stringify(groupsOfMetrics().flatMap(([, charts]) => charts)
      .map(([title, lines]) => [title, lines.map((line) => line.label)])));
    """)
    assert dict(found) == {
        "router/load by layer": ["layer 2", "layer 10"], "correction/kl_k3_age by staleness": ["staleness 2"],
        "rollout/staleness_share by staleness": ["staleness 0", "staleness 1"],
        **{name: [name] for name in ("rollout/staleness", "correction/kl_k3", "environment/reward/a_age_3")},
    }  # fmt: skip
