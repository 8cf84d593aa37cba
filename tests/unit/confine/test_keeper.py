"""Nothing of a program outlives its keeper."""

import os
import signal

import pytest

from megarl.environments.protocol import Task
from tests.helpers.envs.odd_agents import USER, play, pool_of
from tests.helpers.envs.odd_programs import HERE, MARK, marked
from tests.helpers.tiers import long
from tests.helpers.waiting import SAFETY_SECONDS, wait_until


@pytest.mark.parametrize("name", ["leaves_daemons", long("hangs_with_daemons")])
def test_nothing_of_a_program_is_left(name, tmp_path, monkeypatch):
    monkeypatch.setenv(MARK, str(tmp_path))
    pool = pool_of(timeout=1.0 if name == "hangs_with_daemons" else SAFETY_SECONDS)
    try:
        event, _ = play(pool, f"{HERE}:{name}")
        assert (event.failure is None) == (name == "leaves_daemons")
        assert wait_until(lambda: not marked(str(tmp_path)))
    finally:
        pool.close()


def test_a_program_ends_with_its_worker(tmp_path, monkeypatch):
    monkeypatch.setenv(MARK, str(tmp_path))
    pool = pool_of()
    try:
        pool.start(0, Task(USER), f"{HERE}:hangs_with_daemons")
        assert wait_until(lambda: len(marked(str(tmp_path))) > 2 and pool.poll(0.01) == [])
        (process,) = pool._processes
        os.kill(process.process.pid, signal.SIGKILL)
        assert wait_until(lambda: not marked(str(tmp_path)))
        while not (events := pool.poll(1.0)):
            pass
        assert "its process ended" in events[0].failure
    finally:
        pool.close()
