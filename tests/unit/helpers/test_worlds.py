"""The harness that runs worlds of ranks: results, failures of every kind, no process left over."""

import os
import signal
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from tests.helpers import worlds
from tests.helpers.worlds import RankFailed, alive, run_world, wait_until, wait_until_gone


def test_results_come_back_by_rank():
    def add(rank, start):
        total = torch.tensor([float(rank + start)])
        dist.all_reduce(total)
        assert os.environ["RANK"] == str(rank) and os.environ["WORLD_SIZE"] == "3"
        return rank, total, torch.get_num_threads(), os.getpid()

    results = run_world(add, 3, 10)
    assert [r[0] for r in results] == [0, 1, 2]
    assert all(r[1].item() == 33.0 and r[2] == 1 for r in results)
    pids = [r[3] for r in results]
    assert len({*pids, os.getpid()}) == 4
    assert not any(map(alive, pids))
    assert not dist.is_initialized()


def test_a_world_of_one_has_a_group():
    def size(rank):
        return dist.get_world_size()

    assert run_world(size, 1) == [1]


def test_every_world_starts_from_the_same_random_state():
    def draw(rank):
        return torch.rand(3)

    first = run_world(draw, 1)[0]
    torch.rand(5)
    assert torch.equal(run_world(draw, 1)[0], first)


def test_a_rank_that_raises_fails_the_test_with_its_traceback(tmp_path):
    def raise_on_one(rank):
        (tmp_path / str(rank)).write_text(str(os.getpid()))
        dist.barrier()
        if rank == 1:
            raise ValueError("the reason")
        try:
            dist.barrier()  # would wait for rank 1 until the time-out
        finally:
            (tmp_path / "waited to the end").touch()

    with pytest.raises(RankFailed, match=r"(?s)rank 1 of 2 raised.*raise_on_one.*ValueError: the reason"):
        run_world(raise_on_one, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"], "rank 0 must be killed while it waits"
    assert not any(alive(int(path.read_text())) for path in tmp_path.iterdir())


def test_a_result_that_cannot_be_pickled_fails_the_test():
    def unpicklable(rank):
        return lambda: None

    with pytest.raises(RankFailed, match="rank 0 of 1 raised"):
        run_world(unpicklable, 1)


@pytest.mark.parametrize("leave, code", [(os._exit, 3), (sys.exit, 3), (lambda _: os.kill(os.getpid(), 9), -9)])
def test_a_rank_that_ends_fails_the_test_with_its_exit_code(leave, code):
    def end(rank):
        if rank == 0:
            leave(3)
        signal.pause()  # a collective would fail, too, and sometimes first

    with pytest.raises(RankFailed, match=f"rank 0 of 2 ended with exit code {code}"):
        run_world(end, 2)


def test_a_rank_that_hangs_fails_the_test_with_its_stack(tmp_path, monkeypatch):
    """The short time-out takes effect only when rank 0 has answered, however long that takes."""

    def hang(rank):
        (tmp_path / str(rank)).write_text(str(os.getpid()))
        dist.barrier()
        while rank == 1:
            signal.pause()
        return rank

    wait = worlds.connection.wait
    patient = lambda readers, timeout: wait(readers, timeout if len(readers) == 1 else None)  # noqa: E731
    monkeypatch.setattr(worlds.connection, "wait", patient)
    with pytest.raises(RankFailed, match=r"(?s)no result in time from 1 rank.*rank 1 of 2.*in hang"):
        run_world(hang, 2, timeout=1)
    pids = [int(path.read_text()) for path in tmp_path.iterdir()]
    assert len(pids) == 2 and not any(map(alive, pids))


def test_processes_that_a_rank_started_end_with_it():
    def start_one(rank):
        return subprocess.Popen(["sleep", "infinity"]).pid

    assert wait_until_gone(run_world(start_one, 2))


@pytest.mark.long
def test_ranks_end_when_the_test_process_is_killed(tmp_path):
    program = """
import os, signal, sys, pathlib
from tests.helpers.worlds import run_world
def hang(rank):
    pathlib.Path(sys.argv[1], str(rank)).write_text(str(os.getpid()))
    signal.pause()
run_world(hang, 2)
"""
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)]) as parent:
        assert wait_until(lambda: len([p for p in tmp_path.iterdir() if p.read_text()]) == 2)
        pids = [int(path.read_text()) for path in tmp_path.iterdir()]
        parent.kill()
    assert len(pids) == 2 and wait_until_gone(pids)


def test_no_world_inside_a_group():
    def nested(rank):
        return run_world(os.getpid, 1)

    with pytest.raises(RankFailed, match="worlds cannot be forked"):
        run_world(nested, 1)
