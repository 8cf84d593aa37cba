"""One run at a time writes to a folder: another one is refused, and what a dead one left behind is not in the way."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from megarl.errors import RunStopped, UsageError
from megarl.faults import run_lock
from megarl.faults.run_lock import NAME, STALE, RunLock
from tests.helpers.forked_programs import error_line, launch
from tests.helpers.programs import sft_argv

HOLD = "import sys, time; from pathlib import Path; from megarl.faults.run_lock import RunLock\n"
HOLD += "lock = RunLock(Path(sys.argv[1])); print('held', flush=True); time.sleep(1000)"


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock of `tmp_path / "run"`."""
    command = [sys.executable, "-c", HOLD, str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def foreign(folder: Path, seconds_ago: float) -> Path:
    """The lock of a run on another machine."""
    folder.mkdir()
    path = folder / NAME
    path.write_text(json.dumps({"token": "x", "host": "elsewhere", "pid": 7, "started": "1", "job": "12"}))
    now = path.stat().st_mtime
    os.utime(path, (now - seconds_ago, now - seconds_ago))
    return path


def test_a_second_run_is_refused_and_changes_nothing(holder, tmp_path):
    before = (tmp_path / "run" / NAME).read_bytes()
    with pytest.raises(UsageError) as caught:
        RunLock(tmp_path / "run")
    said = str(caught.value)
    assert said.startswith(f"--save {tmp_path / 'run'}: another run (process {holder.pid} on ") and "\n" not in said
    assert os.listdir(tmp_path / "run") == [NAME] and (tmp_path / "run" / NAME).read_bytes() == before


def test_a_program_is_refused_in_one_line(holder, tmp_path):
    save = tmp_path / "run"
    (save / "settings.yaml").write_text("of the first run")
    line = error_line(launch(tmp_path, sft_argv(save, "--train-iters 3"), "sft"))
    assert f"--save {save}: another run (process {holder.pid} on " in line
    assert sorted(os.listdir(save)) == [NAME, "settings.yaml"]
    assert (save / "settings.yaml").read_text() == "of the first run"


def test_the_lock_of_a_dead_run_is_void_at_once(holder, tmp_path):
    holder.kill()
    holder.wait()
    lock = RunLock(tmp_path / "run")
    lock.check()
    lock.release()
    assert os.listdir(tmp_path / "run") == []


def test_a_process_may_take_its_own_lock_again(tmp_path):
    first, second = RunLock(tmp_path), RunLock(tmp_path)
    with pytest.raises(RunStopped, match="has taken the folder; this run must not write there"):
        first.check()
    first.release()  # leaves the lock of the other
    second.check()
    second.release()


def test_the_lock_of_another_machine_is_void_when_it_is_old(tmp_path):
    foreign(tmp_path / "run", STALE + 1)
    RunLock(tmp_path / "run").release()


def test_the_lock_of_another_machine_is_waited_for(tmp_path, capsys):
    foreign(tmp_path / "run", STALE - 2)
    RunLock(tmp_path / "run").release()
    said = capsys.readouterr().err
    assert "another run (job 12, process 7 on elsewhere) wrote here 5" in said and "waiting for it to end" in said


def test_the_lock_of_another_machine_that_is_renewed_is_respected(tmp_path):
    path, is_over = foreign(tmp_path / "run", 3), threading.Event()

    def renew():
        while not is_over.wait(0.05):
            os.utime(path)

    other = threading.Thread(target=renew)
    other.start()
    try:
        with pytest.raises(UsageError, match="another run .job 12, process 7 on elsewhere. writes there"):
            RunLock(tmp_path / "run")
    finally:
        is_over.set()
        other.join()


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"pid": "x"}', "[" * 100_000])
def test_a_damaged_lock_is_void_when_it_is_old(content, tmp_path):
    path = foreign(tmp_path / "run", STALE + 1)
    path.write_text(content)
    os.utime(path, (path.stat().st_mtime - STALE - 1,) * 2)
    RunLock(tmp_path / "run").release()


def test_a_renewed_lock_is_young(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "RENEWED", 0.01)
    lock, path = RunLock(tmp_path), tmp_path / NAME
    os.utime(path, (1.0, 1.0))
    renewed = threading.Event()
    while path.stat().st_mtime == 1.0:
        renewed.wait(0.01)
    lock.release()


def test_a_file_system_without_links(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    lock = RunLock(tmp_path / "run")
    assert json.loads((tmp_path / "run" / NAME).read_text())["pid"] == os.getpid()
    lock.release()


def test_a_lock_under_which_nothing_was_written_leaves_no_folder(tmp_path):
    lock = RunLock(tmp_path / "new" / "run")
    assert (tmp_path / "new" / "run" / NAME).exists()
    lock.release()
    assert not (tmp_path / "new").exists() and tmp_path.exists()
