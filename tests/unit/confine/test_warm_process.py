"""Processes that score in confined children: none is shared with a fork, and each ends with its caller."""

import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from megarl.confine import warm_process
from megarl.rewards import tasks
from megarl.rewards.base import Sample, ScoringError
from megarl.rewards.isolated import Isolated

SUM = Sample("7 + 8 =", "15", "15", {"source_dataset": "chain_sum"})


def test_each_process_has_scorers_of_its_own():
    verify = tasks.reasoning_gym(60.0)
    assert verify(SUM).correct
    mine = warm_process._idle[os.getpid(), "reasoning-gym"][0]
    assert fork_verifies(verify) == [True, True]  # a fork of the warm process
    assert verify(SUM).correct and warm_process._idle[os.getpid(), "reasoning-gym"] == [mine]
    mine.process.process.kill()
    mine.process.process.wait()
    assert fork_verifies(verify) == [True, False]  # a process of its own, since that one has ended
    with pytest.raises((ScoringError, OSError)):
        verify(SUM)
    assert verify(SUM).correct


def fork_verifies(verify):
    """In a forked process: whether a sum is correct, and whether a fork of an earlier process has scored it."""
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            is_correct = verify(SUM).correct
            scorer = warm_process._idle[os.getpid(), "reasoning-gym"][0]
            os.write(write, json.dumps([is_correct, scorer.process is None]).encode())
            scorer.end()
        finally:
            os._exit(0)
    os.close(write)
    with open(read) as stream:
        found = json.load(stream)
    os.waitpid(child, 0)
    return found


def test_threads_share_one_warm_process(monkeypatch):
    monkeypatch.setattr(warm_process, "_idle", {})
    monkeypatch.setattr(warm_process, "_doors", {})
    started, start = [], warm_process._start
    monkeypatch.setattr(warm_process, "_start", lambda module, name: started.append(name) or start(module, name))
    verify, barrier = Isolated("reasoning-gym", 60.0), threading.Barrier(3)
    real_ask = warm_process._Process.ask

    def ask(scorer, request):  # all three have a scorer before one of them asks
        barrier.wait(timeout=60)
        return real_ask(scorer, request)

    monkeypatch.setattr(warm_process._Process, "ask", ask)
    with ThreadPoolExecutor(3) as threads:
        assert all(score.correct for score in threads.map(verify, [SUM] * 3))
    assert started == ["reasoning-gym"] and len(warm_process._idle[os.getpid(), "reasoning-gym"]) == 3
