"""What ends a run before its last step."""

import re

from tests.helpers.forked_programs import launch
from tests.helpers.programs import (
    GRADED,
    metrics,
    rl_argv,
)


def test_an_alarm_ends_a_run_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("MEGARL_END_FILE", str(tmp_path / "reason"))
    argv = rl_argv(tmp_path, f"--train-iters 3 --alarms reward/mean>-1:stop {GRADED}")
    status, _, errors = launch(tmp_path, argv)
    assert status == 3 and (tmp_path / "reason").read_text() == "limit"
    (line,) = [line for line in errors.splitlines() if line.startswith("megarl: stopped: ")]
    assert re.fullmatch(r"megarl: stopped: step 1: reward/mean is \S+ \(--alarms 'reward/mean > -1: stop'\)", line)
    assert "Traceback" not in errors and list(metrics(tmp_path)) == [1]
