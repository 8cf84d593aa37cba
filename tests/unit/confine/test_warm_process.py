"""Processes that answer in confined children: none is shared with a fork, one that died is replaced, none is left."""

import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from megarl.confine import warm_process

MODULE, NAME = "tests.helpers.envs.quick_answers", "lengths"


@pytest.fixture(autouse=True)
def processes(monkeypatch):
    """None at the beginning, and none that is left."""
    monkeypatch.setattr(warm_process, "_idle", {})
    monkeypatch.setattr(warm_process, "_doors", {})
    yield
    for process in warm_process._idle.get((os.getpid(), NAME), []):
        process.end()


def is_answered(text: str = "abc") -> bool:
    return warm_process.ask(MODULE, NAME, {"text": text}) == {"length": len(text)}


def fork_asks() -> list[bool]:
    """In a forked process: whether the answer is right, and whether a fork of an earlier process has given it."""
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            is_right = is_answered()
            process = warm_process._idle[os.getpid(), NAME][0]
            os.write(write, json.dumps([is_right, process.process is None]).encode())
            process.end()
        finally:
            os._exit(0)
    os.close(write)
    with open(read) as stream:
        found = json.load(stream)
    os.waitpid(child, 0)
    return found


def test_each_process_has_one_of_its_own_and_one_that_died_is_replaced():
    assert is_answered()
    mine = warm_process._idle[os.getpid(), NAME][0]
    assert fork_asks() == [True, True]  # of a fork of the warm process
    assert is_answered() and warm_process._idle[os.getpid(), NAME] == [mine]
    mine.process.process.kill()
    mine.process.process.wait()
    assert fork_asks() == [True, False]  # of a process of its own, since that one has ended
    with pytest.raises((warm_process.NoAnswer, OSError)):
        is_answered()
    assert is_answered()


def test_threads_share_one_warm_process(monkeypatch):
    started, start = [], warm_process._start
    monkeypatch.setattr(warm_process, "_start", lambda module, name: started.append(name) or start(module, name))
    barrier, real_ask = threading.Barrier(3), warm_process._Process.ask

    def ask(process, request):  # all three have one before one of them asks
        barrier.wait(timeout=60)
        return real_ask(process, request)

    monkeypatch.setattr(warm_process._Process, "ask", ask)
    with ThreadPoolExecutor(3) as threads:
        assert all(threads.map(is_answered, ["a", "", "abc"]))
    assert started == [NAME] and len(warm_process._idle[os.getpid(), NAME]) == 3


def test_it_ends_with_its_caller():
    program = f"""if True:
        from megarl.confine import warm_process
        warm_process.ask({MODULE!r}, {NAME!r}, {{"text": ""}})
        (processes,) = warm_process._idle.values()
        print(processes[0].process.process.pid)
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=300)
    # It holds standard error, too, so that `run` has waited for its end.
    assert done.stdout.strip().isdigit()
