"""The progress line of a step."""

import pytest

from megarl.observe.terminal import Progress, format_duration


def test_progress_line_full_and_partial(capsys):
    progress = Progress(200)
    metrics = {"reward/mean": 0.5321, "eval/accuracy": 0.61, "kl/reference": 0.01234, "perf/tokens_per_s": 15200.4}
    progress.line(12, metrics, 1.2127)
    progress.line(13, {"reward/mean": -1.0, "kl/reference": None}, 1.2127)
    printed = capsys.readouterr().out
    full, partial = printed.splitlines()
    assert full == ("step   12/200 | reward 0.532 | eval 0.610 | kl 0.0123 | 15,200 tokens/s | 1.21 s | ETA 3m48s")
    assert partial == "step   13/200 | reward -1.000 | 1.21 s | ETA 3m47s"
    assert printed.replace("\n", "").isprintable()


CALLS = {"time/reward/my:slow/calls_s": 6.0, "time/reward/format/calls_s": 2.0}  # in two threads


@pytest.mark.parametrize("metrics, seconds, said", [
    (CALLS | {"time/reward/score_s": 4.0}, 10.0, "rewards 4.0 s (my:slow 3.0 s)"),
    (CALLS | {"time/reward/score_s": 4.0, "time/reward/judge_s": 3.5}, 10.0, "rewards 7.5 s (judge 3.5 s)"),
    (CALLS | {"time/reward/score_s": 4.0, "time/reward/model_s": 2.5}, 10.0, "rewards 6.5 s (my:slow 3.0 s)"),
    (CALLS | {"time/reward/score_s": 4.0}, 17.0, None),  # little of the step
    (CALLS | {"time/reward/score_s": 0.9}, 1.0, None),
    ({"time/reward/score_s": 9.0, "time/reward/eval_score_s": 9.0}, 10.0, None),  # no call: of an environment
    ({}, 10.0, None),
])  # fmt: skip
def test_progress_names_a_slow_reward(metrics, seconds, said, capsys):
    Progress(1).line(1, metrics, seconds)
    columns = capsys.readouterr().out.split(" | ")
    assert columns[2:-1] == ([] if said is None else [said])


def test_progress_eta_is_a_moving_average(capsys):
    progress = Progress(1000)
    progress.line(1, {}, 5000.0)
    for step in range(2, 22):
        progress.line(step, {}, 2.0)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].endswith(f"ETA {format_duration(2501.0 * 998)}")  # mean of 5000 s and 2 s
    assert lines[20].endswith(f"ETA {format_duration(2.0 * 979)}")  # 20 steps later the slow first one is forgotten


def test_progress_takes_other_fields(capsys):
    Progress(2, fields=(("loss", "loss", ".2f"),)).line(2, {"loss": 3.14159, "reward/mean": 1.0}, 0.5)
    assert capsys.readouterr().out == "step    2/2 | loss 3.14 | 0.50 s | ETA 0s\n"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (59.4, "59s"), (59.6, "1m00s"), (228, "3m48s"), (7500, "2h05m"), (97200, "1d03h"), (-3, "0s")],
)
def test_durations(seconds, text):
    assert format_duration(seconds) == text
