"""Files shared by the ranks of a node: computed once, also after a crash; errors are shared; nothing stays behind."""

import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import tracemalloc
from multiprocessing import get_context

import numpy as np
import pytest

from megarl.data import node_files
from megarl.data.conversations import Encoder
from megarl.data.prompts import load_prompts
from megarl.errors import UsageError
from tests.helpers.processes import max_file_size
from tests.helpers.programs import environment
from tests.helpers.worlds import SAFETY_SECONDS

LINES = 20_000


@pytest.fixture
def node(tmp_path, monkeypatch):
    """The folder for temporary files of a node that runs two ranks, which this process and its forks stand for."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(os, "getppid", lambda parent=os.getppid(): parent)  # a fork stands for a sibling
    yield folder
    node_files.remove()


def fork(function, *args):
    """Starts a rank."""
    process = get_context("fork").Process(target=function, args=args)
    process.start()
    return process


def ended(*ranks) -> list[int]:
    for rank in ranks:
        rank.join(SAFETY_SECONDS)
    return [rank.exitcode for rank in ranks]


def computing(log, entered=None, go_on=None):
    """A computation that notes each call; it can tell that it has begun, and wait."""

    def compute():
        with open(log, "a") as file:
            file.write("x")
        if entered:
            entered.set()
            go_on.wait(SAFETY_SECONDS)
        return {"values": np.arange(10_000), "none": np.zeros(0)}

    return compute


def take(log, entered, go_on):
    found = node_files.arrays(lambda: ("key",), computing(log, entered, go_on))
    os._exit(0 if found["values"][7] == 7 and isinstance(found["values"], np.memmap) else 1)


def test_one_rank_computes_and_the_others_wait_for_it(node, tmp_path):
    context = get_context("fork")
    entered, go_on = context.Event(), context.Event()
    ranks = [fork(take, tmp_path / "log", entered, go_on) for _ in range(3)]
    assert entered.wait(SAFETY_SECONDS)
    go_on.set()
    assert ended(*ranks) == [0, 0, 0]
    assert (tmp_path / "log").read_text() == "x"


def test_a_rank_that_dies_while_it_computes_does_not_hang_the_others(node, tmp_path):
    context = get_context("fork")
    entered, never, go_on = context.Event(), context.Event(), context.Event()
    first = fork(take, tmp_path / "log", entered, never)
    assert entered.wait(SAFETY_SECONDS)
    go_on.set()
    second = fork(take, tmp_path / "log", context.Event(), go_on)
    os.kill(first.pid, signal.SIGKILL)
    assert ended(first, second) == [-signal.SIGKILL, 0]
    assert (tmp_path / "log").read_text() == "xx"


def test_wrong_input_is_found_once_and_reported_by_all(node, tmp_path):
    path, calls = tmp_path / "p.jsonl", []
    path.write_text('{"prompt": "a"}\n{"prompt": 3}\n')

    class Counting(Encoder):
        def prompt(self, prompt):
            calls.append(prompt.index)
            raise UsageError("too long", reporting_rank=1)

    for _ in range(2):
        with pytest.raises(UsageError, match=f"{path}:2: prompt must be a string"):
            load_prompts(str(path))
    path.write_text('{"prompt": "a"}\n')  # another file now, so it is read again
    prompts, tokenizer = load_prompts(str(path)), type("Tokenizer", (), {"fingerprint": "f", "prefix_ids": ()})()
    for _ in range(2):
        with pytest.raises(UsageError, match=f"{path}:1: too long"):
            prompts.encode(Counting(tokenizer))
    assert calls == [0]


def test_a_host_holds_a_prompt_file_once(node, tmp_path):
    class Bytes:
        fingerprint, prefix_ids = "bytes", ()

        def encode(self, text):
            return list(text.encode())

    path = tmp_path / "p.jsonl"
    path.write_text("".join(f'{{"prompt": "question {i:06}", "answer": "{i}"}}\n' for i in range(LINES)))
    read = load_prompts(str(path)), load_prompts(str(path)).encode(Encoder(Bytes()), 20)  # the rank that computes
    tracemalloc.start()
    prompts = load_prompts(str(path))
    tokens = prompts.encode(Encoder(Bytes()), 20)
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert prompts[LINES - 1] == read[0][LINES - 1] and prompts[-1].answer == str(LINES - 1)
    assert tokens[3] == read[1][3] == list(b"question 000003")
    assert peak < 64 * 1024 < path.stat().st_size / 10  # neither text nor tokens


def test_mapped_arrays_outlive_the_files_and_the_prompt_file(node, tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text("".join(f'{{"prompt": "question {i}"}}\n' for i in range(1000)))
    prompts = load_prompts(str(path))
    path.write_text("")
    assert list(node.glob("megarl-*/*/*/values.npy"))
    node_files.remove()
    assert not [found for found in node.glob("megarl-*/*") if found.is_dir()]
    assert prompts[999].prompt == "question 999"


def test_the_last_process_that_exits_removes_what_is_left(node, tmp_path):
    (tmp_path / "p.jsonl").write_text("{}\n")
    code = "import sys; from megarl.data.prompts import load_prompts; load_prompts(sys.argv[1])"
    command = [sys.executable, "-c", code, str(tmp_path / "p.jsonl")]
    env = environment(LOCAL_WORLD_SIZE="2", TMPDIR=str(node))
    first, second = (subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) for _ in range(2))
    for rank in (first, second):
        assert "p.jsonl:1: prompt is missing" in rank.communicate(timeout=SAFETY_SECONDS)[1]
    assert (node / f"megarl-{os.getuid()}").is_dir()
    assert not [found for found in node.glob("megarl-*/*") if found.is_dir()]


def test_folders_of_killed_jobs_are_removed_and_others_kept(node):
    base = node / f"megarl-{os.getuid()}"
    base.mkdir(mode=0o700)
    for name in ("killed", "alive"):
        (base / name / "deadbeef").mkdir(parents=True)
    with open(base / "alive" / node_files.USERS, "w") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        node_files.arrays(lambda: ("key",), lambda: {"values": np.zeros(1)})
        assert not (base / "killed").exists() and (base / "alive" / "deadbeef").exists()


def test_a_folder_that_others_may_write_to_is_not_used(node, capsys):
    (node / f"megarl-{os.getuid()}").mkdir(mode=0o777)
    (node / f"megarl-{os.getuid()}").chmod(0o777)
    found = node_files.arrays(lambda: ("key",), lambda: {"values": np.arange(9000)})
    assert not isinstance(found["values"], np.memmap) and list(found["values"][:3]) == [0, 1, 2]
    assert "each rank reads its inputs by itself" in capsys.readouterr().err


def test_arrays_that_cannot_be_written_are_computed_and_the_reason_is_said(node, capsys):
    node_files.arrays(lambda: ("first",), lambda: {"values": np.arange(9)})  # makes the folder
    with max_file_size(1000):
        found = node_files.arrays(lambda: ("key",), lambda: {"values": np.arange(9000)})
    assert list(found["values"][:3]) == [0, 1, 2] and not isinstance(found["values"], np.memmap)
    said = capsys.readouterr().err
    assert "each rank reads its inputs by itself (" in said and "(None)" not in said


def test_without_other_ranks_nothing_is_written(node, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    node_files.arrays(None, lambda: {"values": np.arange(9000)})
    assert not list(node.iterdir())


def test_the_launchers_folder_serves_its_ranks_and_is_removed(node, tmp_path, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    with node_files.folder_for_ranks():
        for _ in range(2):  # the check of the flags, then the ranks
            node_files.arrays(lambda: ("key",), computing(tmp_path / "log"))
            node_files.remove()
        assert (tmp_path / "log").read_text() == "x"
    assert node_files.FOLDER not in os.environ
    assert not [found for found in node.glob("megarl-*/*") if found.is_dir()]
