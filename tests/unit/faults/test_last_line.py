"""The last line of a failed program: which rank is the cause, what it says, and the status.json of a killed run."""

import json
import os
import signal
import socket

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from megarl.checkpoint import folders
from megarl.faults import last_line
from megarl.faults.last_line import Failure
from megarl.observe import status_file


def noted(rank: int, seconds: float, line: str = "") -> Failure:
    details = {"seconds": seconds, "timestamp": str(int(seconds)), "py_callstack": ""}
    return Failure(rank, 1, {"message": {"message": line or f"megarl: rank {rank} failed", "extraInfo": details}})


KILLED, ABORTED, SILENT = Failure(2, -signal.SIGKILL, None), Failure(3, -signal.SIGABRT, None), Failure(4, 1, None)


@pytest.mark.parametrize("failures, rank", [
    ([noted(0, 2.5), noted(1, 2.25)], 1), ([noted(0, 2.5), KILLED], 2), ([ABORTED, noted(0, 2.5)], 0),
    ([SILENT, noted(1, 2.25)], 1), ([SILENT], 4), ([noted(0, 1.0, "of another tool"), noted(1, 2.0)], 1),
    ([Failure(0, 1, {"message": "a text"}), noted(1, 2.0)], 1),
])  # fmt: skip
def test_the_cause_is_a_killed_rank_or_the_first_that_noted_a_line(failures, rank):
    found = last_line.cause(failures)
    assert found is not None and found.rank == rank


def test_a_rank_that_fails_after_another_one_is_not_torchruns_cause(tmp_path, monkeypatch):
    found = []
    for rank, line in enumerate((None, "megarl: rank 1 failed")):
        monkeypatch.setenv(last_line.ERROR_FILE, str(tmp_path / f"{rank}.json"))
        assert last_line.note(line)
        found.append(ProcessFailure(rank, 7, 1, str(tmp_path / f"{rank}.json")))
    assert min(found, key=lambda failure: failure.timestamp).local_rank == 1
    failures = [last_line.read(rank, 1, tmp_path / f"{rank}.json") for rank in range(2)]
    assert last_line.cause(failures) == failures[1] and failures[1].line == "megarl: rank 1 failed"
    monkeypatch.delenv(last_line.ERROR_FILE)
    assert not last_line.note("megarl: nobody reads it")


@pytest.mark.parametrize("repeats, times", [(True, 1), (False, 0)])
def test_a_line_that_stands_alone_is_repeated_only_after_other_output(repeats, times, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(last_line.ERROR_FILE, str(tmp_path / "0.json"))
    last_line.note("megarl: error: a line", is_alone=True)
    last_line.tell([last_line.read(0, 2, tmp_path / "0.json")], repeats=repeats)
    assert capsys.readouterr().err == "megarl: error: a line\n" * times


@pytest.mark.parametrize("content", ["", "[1]", '{"message": {"message": 3}}', '{"message": {"extraInfo": 1}}'])
def test_a_damaged_error_file_is_none(content, tmp_path, capsys):
    (tmp_path / "0.json").write_text(content)
    last_line.tell([last_line.read(0, 1, tmp_path / "0.json")])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("host, state, wanted", [
    (None, "running", "failed"), ("elsewhere", "running", "running"), (None, "ended", "ended"),
])  # fmt: skip
def test_the_status_of_a_killed_run_is_not_running(host, state, wanted, tmp_path, monkeypatch, capsys):
    (tmp_path / status_file.NAME).write_text(
        json.dumps({"state": state, "host": host or socket.gethostname(), "writes": 3, "problem": None})
    )
    monkeypatch.setenv(last_line.SAVE, str(tmp_path))
    last_line.tell([KILLED], folders.how_to_resume)
    line = "rank 2 was ended by SIGKILL; no checkpoint is saved: start the run again"
    assert capsys.readouterr().err == f"megarl: {line}\n"
    found = json.loads((tmp_path / status_file.NAME).read_text())
    assert found["state"] == wanted and (found["problem"] == line) == (state != wanted) == (found["writes"] > 3)
    assert os.listdir(tmp_path) == [status_file.NAME]
