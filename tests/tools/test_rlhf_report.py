"""tools/rlhf_report.py: the table, its limits as an exit status, and the picture, from small run folders."""

import json
import struct
from pathlib import Path

import pytest

from tests.helpers.programs import write_lines
from tests.helpers.tools import load_tool

rlhf_report = load_tool("rlhf_report")

LIMITS = ["--min-accuracy", "0.9", "--max-kl", "3"]


def pipeline(folder: Path, pairs: float = 0.95, model: float = 2.0, true: float = 0.9, kl: float = 2.5) -> Path:
    """The runs of a pipeline: last held-out accuracy of the reward model, last evaluation of PPO, largest KL."""
    for name in ("sft", "reward", "ppo/samples"):
        (folder / name).mkdir(parents=True)
    write_lines(folder / "sft/metrics.jsonl", [{"step": s, "sft/loss": 2 / s, "eval/loss": 3 / s} for s in (1, 2)])
    accuracies = [{"step": step, "eval/accuracy": value} for step, value in ((1, 0.5), (2, pairs))]
    write_lines(folder / "reward/metrics.jsonl", accuracies)
    scores = ((0, 0.5, 0.8), (2, model, true))
    found = {s: {"eval/reward/model": m, "eval/reward/reasoning-gym": t, "eval/accuracy": t / 2} for s, m, t in scores}
    steps = [{"step": 1, "kl/reference": kl}, {"step": 2, "kl/reference": 0.25, "reward/model/mean": 0.1}]
    write_lines(folder / "ppo/metrics.jsonl", [{"step": 0} | found[0], steps[0], steps[1] | found[2]])
    for step in (1, 2):
        values = [{"model": step * score, "reasoning-gym": score} for score in (0.0, 0.5, 1.0, 1.0)]
        rows = [{"reward_values": each} for each in values]
        write_lines(folder / f"ppo/samples/step_{step:08d}.jsonl", rows)
    return folder


def test_a_good_pipeline_has_a_table_and_a_picture(tmp_path, capsys):
    assert rlhf_report.main([str(pipeline(tmp_path)), *LIMITS]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "before after limit",
        "reward model: held-out pairs in order 0.500 0.950 at least 0.9",
        "PPO: model's reward, held-out prompts 0.500 2.000 rises",
        "PPO: true score, held-out prompts 0.800 0.900 rises",
        "PPO: exact answers, held-out prompts 0.400 0.450 rises",
        "PPO: KL per response, last step 0.250",
        "PPO: KL per response, largest 2.500 at most 3",
        "", str(tmp_path / "report.png"),
    ]  # fmt: skip
    png = (tmp_path / "report.png").read_bytes()
    assert png.startswith(b"\x89PNG") and struct.unpack(">II", png[16:24]) == (1650, 990)


@pytest.mark.parametrize("change, missed", [
    ({"pairs": 0.89}, ["pairs in order"]), ({"model": 0.5}, ["model's reward"]), ({"kl": 3.1}, ["largest"]),
    ({"true": 0.79, "model": 9.0}, ["true score", "exact answers"]),
])  # fmt: skip
def test_each_limit_is_an_exit_status(change, missed, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(rlhf_report, "draw", lambda *_: b"")  # has its tests
    assert rlhf_report.main([str(pipeline(tmp_path, **change)), *LIMITS]) == 1
    printed = [line for line in capsys.readouterr().out.splitlines() if "MISSED" in line]
    assert len(printed) == len(missed) and all(name in line for name, line in zip(missed, printed, strict=True))


def test_the_picture_shows_all_stages_and_both_limits(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    figures, savefig = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, *a, **kw: (figures.append(figure), savefig(figure, *a, **kw)))
    assert rlhf_report.main([str(pipeline(tmp_path)), *LIMITS]) == 0
    panels = [[line.get_ydata() for line in axes.lines] for axes in figures[0].axes]
    panels = [[list(map(float, y)) for y in lines] for lines in panels]
    assert panels == [
        [[2, 1], [3, 1.5]], [[0.5, 0.95], [0.9, 0.9]], [[0.1], [0.5, 2]], [[0.8, 0.9], [0.4, 0.45]],
        [[2.5, 0.25], [3, 3]], [[0, 0.5, 1], [0, 1, 2]],
    ]  # fmt: skip


@pytest.mark.parametrize("cut, flags, says", [
    ("reward/metrics.jsonl", LIMITS, "no metrics file"), ("", ["--max-kl", "3"], "--min-accuracy"),
    ("ppo/metrics.jsonl", LIMITS, "have 1 values of eval/reward/model"),
])  # fmt: skip
def test_wrong_use_is_reported_in_one_line(cut, flags, says, tmp_path, refusal):
    pipeline(tmp_path)
    if cut.startswith("ppo"):
        rows = (tmp_path / cut).read_text().splitlines()
        write_lines(tmp_path / cut, [json.loads(row) for row in rows[:2]])
    elif cut:
        (tmp_path / cut).unlink()
    assert says in refusal(rlhf_report.main, [str(tmp_path), *flags]) and not (tmp_path / "report.png").exists()
