"""tools/curves.py: reading runs, table and picture from small run folders, what is run again, and one real run."""

import argparse
import json
import os
import sys
from pathlib import Path

import pytest

from megarl.observe.settings_file import read_settings
from tests.helpers.programs import SHAPE, inputs
from tests.helpers.tools import load_tool

curves = load_tool("curves")


def write_run(folder: Path, accuracies: dict[int, float], steps: int, tokens: int = 10) -> Path:
    """A run folder: evaluations by step, and the number of generated tokens of each step."""
    rows = [{"step": 0}] if 0 in accuracies else []
    rows += [{"step": step, "rollout/tokens": tokens} for step in range(1, steps + 1)]
    for row in rows:
        row |= {"eval/accuracy": accuracies[row["step"]]} if row["step"] in accuracies else {}
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def curve(recipe: str, seed: int, *accuracy: float, **metrics: float):
    """A curve with an evaluation every ten steps."""
    steps = list(range(0, 10 * len(accuracy), 10))
    return curves.Curve(recipe, seed, steps, list(accuracy), [100 * step for step in steps], metrics)


SOME = [curve("ppo", 2, 0.4, 0.5, 0.7), curve("grpo", 1, 0.4, 0.6, 0.56), curve("ppo", 1, 0.4, 0.55, 0.62)]


def test_a_curve_is_read_from_a_run(tmp_path):
    found = curves.read_curve(
        write_run(tmp_path / "run", {0: 0.25, 2: 0.5, 5: 0.75}, steps=5), "ppo", 3, ["rollout/tokens", "kl"]
    )
    assert found == ("ppo", 3, [0, 2, 5], [0.25, 0.5, 0.75], [0, 20, 50], {"rollout/tokens": 10})
    assert (found.gain, found.mean) == (50, 62.5)


def test_a_run_without_two_evaluations_is_rejected(tmp_path):
    with pytest.raises(curves.UsageError, match="has 1 evaluations"):
        curves.read_curve(write_run(tmp_path / "run", {0: 0.25}, steps=5), "ppo", 3, [])


def test_the_table_has_a_row_a_recipe_and_a_column_a_seed():
    assert curves.table(SOME).splitlines() == [
        "| run | seed 1 | seed 2 | smallest gain |",
        "| --- | --- | --- | --- |",
        "| ppo | 40.0 → 62.0 (+22.0) | 40.0 → 70.0 (+30.0) | +22.0 |",
        "| grpo | 40.0 → 56.0 (+16.0) |  | +16.0 |",
    ]


LAGS = [
    curve("lag 0", 1, 0.4, 0.6, 0.8, kl=0.0), curve("lag 0", 2, 0.4, 0.5, 0.6, kl=0.0),
    curve("tis/lag 2", 1, 0.4, 0.5, 0.8, kl=0.1), curve("tis/lag 2", 2, 0.4, 0.5, 0.8, kl=0.3),
    curve("none/lag 2", 2, 0.4, 0.4, 0.5),
]  # fmt: skip


def test_variants_are_compared_with_the_first_seed_by_seed():
    assert curves.paired_table(LAGS).splitlines() == [
        "| run | mean accuracy over the run | difference to lag 0 (95 % interval) | kl |",
        "| --- | --- | --- | --- |",
        "| lag 0 | 62.5 % |  | 0 |",
        "| tis/lag 2 | 65.0 % | +2.5 (-92.8 to +97.8) | 0.2 |",
        "| none/lag 2 | 45.0 % | -10.0 |  |",
    ]


def test_a_group_of_variants_has_a_panel(monkeypatch):
    from matplotlib.axes import Axes

    plot, means = Axes.plot, []

    def plot_and_note(axes, x, y, **style):
        means.extend([(axes, style["label"], style["color"])] if "label" in style else [])
        return plot(axes, x, y, **style)

    monkeypatch.setattr(Axes, "plot", plot_and_note)
    assert curves.draw(LAGS).startswith(b"\x89PNG")
    assert [(axes.get_title(), *rest) for axes, *rest in means] == [
        ("tis", "lag 0", "C0"), ("tis", "lag 2", "C1"), ("none", "lag 0", "C0"), ("none", "lag 2", "C1")
    ]  # fmt: skip


def test_the_picture_has_thin_seeds_and_their_thick_mean(monkeypatch):
    from matplotlib.axes import Axes

    plot, lines = Axes.plot, []

    def plot_and_note(axes, x, y, **style):
        lines.append((list(x), [round(value, 6) for value in y], style["color"], style["lw"] > 1))
        return plot(axes, x, y, **style)

    monkeypatch.setattr(Axes, "plot", plot_and_note)
    picture = curves.draw(SOME)
    assert picture.startswith(b"\x89PNG") and len(picture) > 10_000
    assert len(lines) == 2 * 5  # two panels of three seeds and two means
    assert lines[2] == ([0, 10, 20], [40, 52.5, 66], "C0", True)
    assert lines[7] == ([0, 1, 2], [40, 52.5, 66], "C0", True)
    assert [line[2:] for line in lines[:5]] == [("C0", False), ("C0", False), ("C0", True), ("C1", False), ("C1", True)]


@pytest.mark.parametrize("least, status", [(15, 0), (16.1, 1)])
def test_a_small_gain_is_an_exit_status(least, status, tmp_path, capsys):
    assert curves.report(SOME, tmp_path, argparse.Namespace(metrics=[], min_gain=least)) == status
    printed = capsys.readouterr()
    assert curves.table(SOME) in printed.out
    assert printed.err == (
        "" if status == 0 else "curves: grpo seed 1 gained 16.0 points, fewer than --min-gain 16.1\n"
    )
    assert (tmp_path / "curves.png").stat().st_size > 0
    assert [curves.Curve(**row) for row in json.loads((tmp_path / "curves.json").read_text())] == SOME


@pytest.mark.parametrize("flags, says", [
    ("", "--out"), ("--out o --recipes ppq", "invalid choice: 'ppq'"), ("--out o --jobs 0", "--jobs 0: must be at"),
    ("--out o --seeds 1 -1", "--seeds -1: must be"), ("--out o --steps 0", "--steps 0"), ("--out o --step 3", "--step"),
    ("--out o --ranks 0", "--ranks 0: must be"), ("--out o --variants a", "a: allowed is NAME=FLAGS"),
    ("--out o --variants a=", "--variants needs one recipe: add --recipes NAME"),
    ("--out o --config no.yaml", "--config no.yaml: no.yaml does not"),
    ("--out o --warm-start no", "no/data does not exist"),
    ("--out o --runs a", "a: allowed is NAME=DIR, the folder of a run with metrics.jsonl and settings.yaml"),
    ("--out o --runs a=no", "a=no: allowed is NAME=DIR"),
])  # fmt: skip
def test_wrong_use_is_reported_in_one_line(flags, says, refusal, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert says in refusal(curves.main, flags.split())
    assert not list(tmp_path.iterdir())


def test_runs_that_are_there_are_drawn(tmp_path, capsys, refusal):
    named = []
    for name, seed, last in (("one", 4, 0.75), ("one", 2, 0.5), ("two", 2, 0.9)):
        folder = write_run(tmp_path / f"{name}{seed}", {0: 0.25, 5: last}, steps=5)
        (folder / "settings.yaml").write_text(f"megarl:\n  seed: {seed}\n")
        named.append(f"{name}={folder}")
    assert curves.main(["--out", str(tmp_path / "out"), "--runs", *named]) == 0
    assert "| one | 25.0 → 50.0 (+25.0) | 25.0 → 75.0 (+50.0) | +25.0 |" in capsys.readouterr().out
    found = json.loads((tmp_path / "out" / "curves.json").read_text())
    assert [(curve["recipe"], curve["seed"], curve["accuracy"]) for curve in found] == [
        ("one", 4, [0.25, 0.75]), ("one", 2, [0.25, 0.5]), ("two", 2, [0.25, 0.9])
    ]  # fmt: skip
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"curves.png", "curves.json"}
    argv = ["--out", str(tmp_path / "out"), "--runs", *named, "--metrics", "rollout/tokens", "kl"]
    assert refusal(curves.main, argv) == "curves: --metrics kl: no run has it in its second half"


def test_complete_runs_are_not_repeated(tmp_path):
    config, folder = tmp_path / "config.yaml", tmp_path / "run"
    config.write_text("lr: 1")
    count = ["bash", "-c", "printf x >> $0", str(tmp_path / "count")]
    assert [curves.ensure(folder, count, [str(config)]) for _ in range(2)] == [True, False]
    config.write_text("lr: 2")
    assert [curves.ensure(folder, count, [str(config)]) for _ in range(2)] == [True, False]
    assert [curves.ensure(folder, [*count, "more"], [str(config)]) for _ in range(2)] == [True, False]
    assert not curves.ensure(folder, ["/bin/bash", *count[1:], "more"], [str(config)])
    fails = ["bash", "-c", "echo because; exit 3"]
    for _ in range(2):
        with pytest.raises(curves.RunFailed, match="run: its command ended with status 3; see .*run.log"):
            curves.ensure(folder, fails, [str(config)])
        assert Path(f"{folder}.log").read_text() == "because\n"
    assert (tmp_path / "count").read_text() == "xxx"


def test_the_warm_start_is_that_of_the_quickstart_ended_earlier(tmp_path, monkeypatch):
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "warm_start.sh").write_text('echo "$SAVE $SEED $CONFIG $MEGARL_VENV:$# $*"\n')
    monkeypatch.setattr(curves, "ROOT", tmp_path)
    monkeypatch.setenv("SEED", "9")
    monkeypatch.delenv("MEGARL_VENV", raising=False)
    start = tmp_path / "start"
    curves.make_warm_start(start)
    assert (
        start / "sft.log"
    ).read_text() == f"{start} {curves.START} quickstart {sys.prefix}:2 --target-eval-loss 0.3\n"


@pytest.mark.long
def test_a_real_run_and_a_second_call_that_only_draws(tmp_path, capfd):
    start, out = tmp_path / "start", tmp_path / "out"
    (start / "data").mkdir(parents=True)
    for name in ("train.jsonl", "heldout.jsonl", "tokenizer.model"):
        os.symlink(inputs() / name, start / "data" / name)
    os.symlink(inputs() / "sft", start / "sft")
    config = tmp_path / "run.yaml"
    pairs = SHAPE.replace("--swiglu", "--swiglu true").replace("--disable-bias-linear", "--disable-bias-linear true")
    pairs = pairs.replace("--group-query-attention", "--group-query-attention true").split()
    shape = dict(zip((flag.removeprefix("--") for flag in pairs[::2]), pairs[1::2], strict=True))
    shape |= {"prompts-per-step": 4, "rollout-buffer-gb": 0.001, "rollout-max-requests": 8, "lr": 1e-3}
    config.write_text("".join(f"{key}: {value}\n" for key, value in shape.items()) + "eval-interval: 2\n")
    command = f"--out {out} --warm-start {start} --config {config} --recipes dr_grpo --seeds 4 --steps 3".split()
    command += ["--variants", "low=--lr 1e-5", "--metrics", "actor/entropy"]
    assert curves.main([*command, "--min-gain", "-100"]) == 0
    assert "(complete before)" not in capfd.readouterr().out
    (found,) = json.loads((out / "curves.json").read_text())
    assert (found["recipe"], found["seed"], found["steps"]) == ("low", 4, [0, 2, 3])
    assert (
        found["metrics"]["actor/entropy"] > 0
        and read_settings(out / "low" / "seed4")["roles"]["actor"]["megatron"]["lr"] == 1e-5
    )
    assert 0 == found["tokens"][0] < found["tokens"][1] < found["tokens"][2]
    stamp = (out / "low" / "seed4" / "metrics.jsonl").stat().st_mtime_ns
    assert curves.main([*command, "--min-gain", "101"]) == 1
    assert "low seed 4" in (printed := capfd.readouterr()).out and "(complete before)" in printed.out
    assert (out / "low" / "seed4" / "metrics.jsonl").stat().st_mtime_ns == stamp
