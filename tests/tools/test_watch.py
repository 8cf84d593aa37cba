"""tools/watch.py: what it shows of runs that continue, end, hang or stop reporting, from their files alone."""

import json
import os
import subprocess
import sys
import time

import pytest

from megarl.observe import status_file
from tests.helpers.programs import environment
from tests.helpers.tools import TOOLS
from tools import watch
from tools._run_reader import KEPT_ROWS, RunReader

UPDATE = ["actor", "update", 4, 1.5, 0.5, False]
WAIT = ["actor", "wait", 4, 0.25, 0.5, False]
STUCK = ["critic", "values", 4, 75.0, 75.0, False]
SETTINGS = {
    "megarl": {"train_iters": 10},
    "roles": {"actor": {"ranks": "0-2"}, "critic": {"ranks": "3-3"}, "reward": {"ranks": "3-3"}},
}


def status(ranks=(UPDATE, WAIT, UPDATE, STUCK), writes=1, **more) -> dict:
    content = {"format": 1, "world_size": len(ranks), "interval": 2.0, "limit": 600.0, "host": "node-7", "pid": 42,
               "writes": writes, "uptime": 83.0, "state": "running", "problem": None, "unix_time": 1e9}  # fmt: skip
    return {**content, "ranks": list(ranks), **more}


def rows(last: int):
    """PPO rows 0 to `last`: step 0 is an evaluation alone."""
    yield {"step": 0, "eval/accuracy": 0.25}
    for step in range(1, last + 1):
        yield {"step": step, "reward/mean": step / 8, "kl/reference": 0.5, "perf/tokens_per_s": 1234.0,
               "time/step_s": 2.0, "rollout/logprob_gap_max": 0.0, "memory/actor/peak_bytes": 3 * 2**30,
               "steps_skipped": 0, **({"eval/accuracy": 0.5} if step == 2 else {})}  # fmt: skip


def write(folder, last=4, content=None, settings=SETTINGS):
    """The folder of a run after `last` steps."""
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(last)))
    (folder / "settings.yaml").write_text(json.dumps(settings))
    if content is not None:
        (folder / "status.json").write_text(json.dumps(content))
    return folder


def once(capsys, *folders) -> tuple[int, list[str]]:
    code = watch.main([*map(str, folders), "--once"])
    printed = capsys.readouterr()
    assert printed.err == ""
    return code, printed.out.splitlines()


def words(lines: list[str], start: str) -> list[str]:
    return next(line.split() for line in lines if line.startswith(start))


def test_a_frame_of_a_running_run(tmp_path, capsys):
    code, lines = once(capsys, write(tmp_path / "run", content=status()))
    assert code == 0
    assert lines[0] == f"{tmp_path}/run  step 4/10 [{'#' * 12}{'-' * 18}] 40%  ETA 12s"
    assert lines[1] == "running for 1m23s on 4 ranks, rank 0 on node-7"
    assert words(lines, "reward ") == ["reward", "0.500", "▁▃▆█"]
    assert words(lines, "eval ") == ["eval", "0.500", "▁█", "best", "0.500"]
    assert words(lines, "kl ") == ["kl", "0.5000", "▁▁▁▁"]
    assert words(lines, "log-prob gap")[2] == "0" and words(lines, "tokens/s")[1] == "1,234"
    assert words(lines, "memory actor/peak_bytes")[2:] == ["3.0", "GiB"]
    assert not any(line.startswith("steps skipped") for line in lines)


def test_roles_are_shown_with_their_phases_and_the_ranks_in_them(tmp_path, capsys):
    run = RunReader(write(tmp_path / "run", content=status()))
    run.update()
    run.age = 0.0
    lines = watch.frame(run)
    start = next(i for i, line in enumerate(lines) if line.startswith("roles"))
    assert [line.split() for line in lines[start + 1 : start + 4]] == [
        ["actor", "0-2", "actor/update", "4", "2", "1.5"],
        ["actor/wait", "4", "1", "0.2"],
        ["critic,", "reward", "3-3", "critic/values", "4", "1", "75.0"],
    ]
    assert lines[start + 4] == (
        "rank 3 (critic/values, step 4): no progress for 75 s; the run ends when a whole role has made none for 600 s"
    )
    assert len(lines) == start + 5


def test_ranks_in_set_up_and_unheard_of(tmp_path):
    first = [None, None, 0, 3.0, 0.0, False]
    content = status([first, [], ["x", "y", 2, 0, 0, True], [None, None, 1, 0, 0, False]])
    run = RunReader(write(tmp_path / "run", content=content, settings={}))
    run.update()
    assert run.total_steps is None and run.roles == {}
    assert {line.split("  ")[0].strip() for line in watch.role_lines(run)[2:]} <= {"", "all"}
    text = "\n".join(watch.role_lines(run))
    assert all(word in text for word in ("set-up", "not heard of yet", "ended its work", "between phases"))


@pytest.mark.parametrize("content, code, line", [
    (status(state="ended"), 0, "ended (4 ranks, rank 0 on node-7)"),
    (status(state="hung", problem="no rank has made progress for 600 s"), 1,
     "hung: no rank has made progress for 600 s"),
    (status(state="failed"), 1, "failed: rank 0 ended with an error; its last lines say which"),
    (None, 0, "no status.json: the run has not started, or an older version writes it"),
])  # fmt: skip
def test_how_a_run_ended_is_said(content, code, line, tmp_path, capsys):
    found, lines = once(capsys, write(tmp_path / "run", content=content))
    assert (found, lines[1]) == (code, line)
    assert any(line.startswith("roles") for line in lines) == bool(content and content["state"] != "ended")


def test_a_run_falls_silent_when_its_status_stays_the_same_by_the_watchers_own_clock(tmp_path):
    run = RunReader(write(tmp_path / "run", content=status(unix_time=9e9)))  # whatever its machine's clock says
    file = tmp_path / "run" / "status.json"
    os.utime(file, (4e9, 4e9))  # the file server's clock is ahead: that counts as new
    run.update(now=1000.0)
    assert run.age == 0.0 and run.is_alive()
    run.update(now=1009.0)
    assert run.age == 9.0 and run.is_alive()
    file.write_text(json.dumps(status(writes=2)))
    run.update(now=1011.0)
    assert run.age == 0.0
    run.update(now=1022.0)
    assert run.age == 11.0 and not run.is_alive() and not watch.is_healthy(run)
    assert watch.state_line(run) == (
        "no sign of life for 11s: its processes are gone or stopped (4 ranks, rank 0 on node-7); "
        f"if they are gone, resume with --load {tmp_path}/run"
    )
    slow = write(tmp_path / "slow", content=status(interval=30.0))  # a large world reports rarely
    run = RunReader(slow)
    run.update(now=0.0)
    run.update(now=140.0)
    assert run.is_alive()


def test_a_status_that_was_old_at_the_first_look_is_silent(tmp_path, capsys):
    run = write(tmp_path / "run", content=status())
    os.utime(run / "status.json", (time.time() - 7300, time.time() - 7300))
    code, lines = once(capsys, run)
    assert code == 1 and lines[1].startswith("no sign of life for 2h0")


def test_new_lines_are_read_once_and_a_file_that_was_replaced_from_its_start(tmp_path):
    run = RunReader(write(tmp_path / "run", last=3))
    file = tmp_path / "run" / "metrics.jsonl"
    run.update()
    assert run.step == 3
    with open(file, "a") as metrics:
        metrics.write('{"step": 4, "reward/mean": 0.5}\n{"step": 5, "rew')
    run.update()
    assert run.step == 4 and len(run.rows) == 5
    with open(file, "a") as metrics:
        metrics.write('ard/mean": 2.0}\nno json\n[1]\n')
    run.update()
    assert run.step == 5 and run.last("reward/mean") == 2.0
    other = tmp_path / "other"
    other.write_text('{"step": 1, "reward/mean": null}\n')
    os.replace(other, file)  # resumed
    run.update()
    assert [row["step"] for row in run.rows] == [1] and run.last("reward/mean") is None
    file.unlink()
    run.update()
    assert run.step == 1


def test_only_the_last_rows_are_kept(tmp_path):
    run = RunReader(write(tmp_path / "run", last=2 * KEPT_ROWS))
    run.update()
    assert len(run.rows) == KEPT_ROWS and run.step == 2 * KEPT_ROWS


def test_several_runs_have_a_line_each(tmp_path, capsys):
    one = write(tmp_path / "one", content=status())
    two = write(tmp_path / "two", last=10, content=status(state="ended"))
    old = write(tmp_path / "old", settings={})
    code, lines = once(capsys, one, two, old)
    assert code == 0
    assert [line.split()[1:3] for line in lines] == [["running", "4/10"], ["ended", "10/10"], ["unknown", "4/?"]]
    assert "[####------]" in lines[0] and lines[0].endswith("ETA 12s") and "reward 1.250" in lines[1]


@pytest.mark.parametrize("field", ["host", "problem", "phase", "state"])
def test_nothing_in_a_file_can_write_to_the_terminal(field, tmp_path, capsys):
    evil = "\x1b]0;x\x07\x9b2J\u202e\nroot"
    content = status([["actor", evil, 1, 0, 0, False]]) if field == "phase" else status(**{field: evil})
    if field == "problem":
        content["state"] = "hung"
    settings = {"megarl": {"train_iters": 10}, "roles": {evil: {"ranks": "0-0"}}}
    _, lines = once(capsys, write(tmp_path / "run", content=content, settings=settings))
    assert all(line.isprintable() for line in lines) and r"\x1b]0;x\x07\x9b2J\u202e\nroot" in "\n".join(lines)


DAMAGED = {
    "no JSON": "{", "a list": "[]", "empty": "{}", "another format": json.dumps(status() | {"format": 2}),
    "a text for a number": json.dumps(status([["actor", "update", "4", 0, 0, False]])),
    "a short row": json.dumps(status([["actor"]])), "no host": json.dumps(status(host=None)),
    "not finite": json.dumps(status(uptime=float("nan"))), "not UTF-8": b"\xff\xfe",
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_status_is_said_and_the_metrics_are_shown(case, tmp_path, capsys):
    folder, content = write(tmp_path / "run"), DAMAGED[case]
    (folder / "status.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    code, lines = once(capsys, folder)
    assert code == 0 and lines[1].startswith("status.json cannot be read: ") and words(lines, "reward ")


@pytest.mark.parametrize("name", ["metrics.jsonl", "settings.yaml"])
def test_other_damaged_files_are_waited_for(name, tmp_path, capsys):
    folder = write(tmp_path / "run", content=status())
    (folder / name).write_bytes(b"\xff: [\x00")
    code, lines = once(capsys, folder)
    assert code == 0 and "running for" in lines[1]


def test_frames_follow_each_other_in_a_pipe_until_the_run_has_ended(tmp_path):
    """The real program: frames without control characters, the last one of the ended run."""
    folder = write(tmp_path / "run", content=status())
    command = [sys.executable, str(TOOLS / "watch.py"), str(folder), "--interval", "0.1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment()) as process:
        seen = [process.stdout.readline() for _ in range(2)]
        (folder / "status.json").write_text(json.dumps(status(state="ended")))
        rest = process.stdout.read()
    assert process.returncode == 0 and "step 4/10" in seen[0] and "running for" in seen[1]
    assert "ended (4 ranks, rank 0 on node-7)" in rest and "\x1b" not in rest


def test_a_terminal_gets_frames_of_its_size(tmp_path, monkeypatch, capsys):
    """A pseudo-terminal of 40 columns and 8 lines."""
    folder = write(tmp_path / "run", content=status(state="ended"))
    parent, child = os.openpty()
    sizes = {"COLUMNS": "40", "LINES": "8"}
    with os.fdopen(child, "w") as terminal:
        command = [sys.executable, str(TOOLS / "watch.py"), str(folder)]
        assert subprocess.run(command, stdout=terminal, env=environment(**sizes)).returncode == 0
    shown = os.read(parent, 1 << 16).decode()
    os.close(parent)
    body = shown.split(watch.CLEAR_BELOW)[1].replace(watch.HOME, "")
    lines = body.replace(watch.CLEAR_LINE, "").replace("\r\n", "\n").splitlines()
    assert len(lines) == 7 and max(map(len, lines)) == 40 and shown.rstrip().endswith(watch.SHOW_CURSOR)


WRONG = {
    "no folder": (["nowhere"], "nowhere: no such folder"),
    "no run": (["."], "is not the folder of a run"),
    "no time": (["RUN", "--interval", "0"], "--interval 0.0: allowed is 0.1 to 3600"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_gives_one_line(case, tmp_path, refusal, monkeypatch):
    argv, expected = WRONG[case]
    run = write(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    assert expected in refusal(watch.main, [str(run) if word == "RUN" else word for word in argv])
    assert status_file.NAME == "status.json"
