"""The report: curves, table, escaping of hostile texts, missing metrics, the command line."""

import json
import math
import re
import struct
import subprocess
import sys
import time
from html.parser import HTMLParser

import pytest

from megarl.errors import UsageError
from megarl.observe.report import best_index, main, write_report
from megarl.observe.report_axes import series
from megarl.observe.report_figure import draw_report
from megarl.observe.samples import SamplesWriter

FULL = {
    "reward/mean": 0.5, "reward/std": 0.2, "eval/accuracy": 0.4, "kl/reference": 0.01, "kl/coefficient": 0.05,
    "rollout/response_length_mean": 4.0, "actor/loss": -0.01, "critic/loss": 0.2, "rollout/logprob_gap_max": 1e-6,
}  # fmt: skip


def _metrics_file(directory, rows):
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


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


def test_report_of_a_long_run_is_self_contained(tmp_path):
    rows = [{"step": step} for step in range(200)]
    for row in rows:
        row.update({name: value * (1 + math.sin(row["step"])) for name, value in FULL.items()})
        row.update({f"time/actor/phase{index}_s": 0.1 for index in range(40)})
    _metrics_file(tmp_path, rows)
    draw_report(rows[:1], "first")  # on a new machine the first figure also builds matplotlib's list of fonts
    start = time.process_time()  # not wall time: other programs may share the machine
    picture, page = write_report(tmp_path)
    assert time.process_time() - start < 4
    text = page.read_text()
    assert picture.read_bytes().startswith(b"\x89PNG") and 'src="data:image/png;base64,iVBOR' in text
    assert not re.search(r'(?:src|href)="(?!data:)', text)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "report.html", "report.png"]


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
    assert ("0" in labels) == (0.0 in gaps)
    assert any(label.startswith("$10^") for label in labels) == (max(gaps) > 0)
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


def test_table_has_first_last_best(tmp_path):
    rows = [
        {"step": step, "eval/accuracy": accuracy, "critic/loss": loss, "actor/entropy": 1.0, "lost": None}
        for step, accuracy, loss in ((0, 0.25, 3.0), (5, 0.75, 1.0), (9, 0.5, 2.0))
    ]
    _metrics_file(tmp_path, rows)
    text = write_report(tmp_path)[1].read_text()
    table = {}
    for line in re.findall(r"<tr><td>.*?</tr>", text):
        name, *cells = re.findall(r"<td[^>]*>(.*?)</td>", line)
        table[name] = cells
    assert table == {
        "eval/accuracy": ["0.25", "0.5", "0.75 (step 5)", "0.25", "0.75"],
        "critic/loss": ["3", "2", "1 (step 5)", "1", "3"],
        "actor/entropy": ["1", "1", "", "1", "1"],
        "lost": ["not finite", "not finite", "", "", ""],
    }


def test_direction_of_better():
    values = [2.0, 1.0, 3.0]
    assert best_index("rollout/tokens_per_s", values) == 2
    assert best_index("time/actor/update_s", values) == 1
    assert best_index("kl/coefficient", values) is None


class _Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.text = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, [name for name, _ in attrs]))

    def handle_data(self, data):
        self.text.append(data)


def test_hostile_texts_stay_text(tmp_path):
    hostile = "</td><script>alert('x')</script><img src=x onerror=\"alert(1)\"> & \u2028 </details>"
    _metrics_file(tmp_path, [{"step": 1, "<b>name</b>": 1.0, **FULL}])
    (tmp_path / "settings.yaml").write_text(f"prompt: {hostile}\n", encoding="utf-8")
    SamplesWriter(tmp_path).write(1, [{"prompt": "old", "response": "old"}])
    row = {"prompt": hostile, "response": hostile + "\udc80", "reward": 0.5, "reward_parts": {hostile: 1.0}}
    SamplesWriter(tmp_path).write(2, [row] * 50)
    parser = _Tags()
    parser.feed(write_report(tmp_path)[1].read_text(encoding="utf-8"))
    tags = [tag for tag, _ in parser.tags]
    assert "script" not in tags and "b" not in tags and tags.count("img") == tags.count("details") == 1
    assert not any("onerror" in names for _, names in parser.tags)
    assert parser.text.count(hostile) == 20 and "old" not in parser.text  # latest file, first 20 prompts
    assert f"prompt: {hostile}\n" in parser.text


def test_no_step_yet_is_a_usage_error(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(UsageError, match="no step"):
        write_report(tmp_path)


def test_command_line(tmp_path, capsys):
    result = subprocess.run(
        [sys.executable, "-m", "megarl.observe.report", str(tmp_path)], capture_output=True, text=True
    )
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.count("\n") == 1 and "metrics.jsonl" in result.stderr
    _metrics_file(tmp_path, [{"step": 1, **FULL}])
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.split() == [str(tmp_path / "report.png"), str(tmp_path / "report.html")]


def test_reward_components_have_their_own_lines(monkeypatch):
    rows = [{**FULL, "step": step, "reward/model/mean": 1.5, "reward/m:f/mean": 0.5} for step in range(3)]
    _, panels = _panel_texts(rows, monkeypatch)
    labels = [text.get_text() for text in panels["Reward (mean ± standard deviation)"].get_legend().get_texts()]
    assert labels == ["reward", "m:f", "model"]
    alone = [{**FULL, "step": step, "reward/exact-match/mean": 0.5} for step in range(3)]
    assert _panel_texts(alone, monkeypatch)[1]["Reward (mean ± standard deviation)"].get_legend() is None
