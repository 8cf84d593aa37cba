"""A worker process: many episodes at once, threads that hang, and a loop that is blocked."""

import asyncio

import pytest

from megarl.environments.worker import Worker
from tests.helpers.envs.odd_environments import MEETING
from tests.helpers.worlds import wait_until


@pytest.mark.parametrize("name", ["AsyncMeeting", "ThreadMeeting"])
def test_episodes_of_a_worker_wait_at_the_same_time(name, play):
    plays, numbers = play(name), range(MEETING)
    plays.start(*numbers)
    assert len(plays.processes()) == 1
    found = plays.step({number: f"text {number}" for number in numbers})
    assert [found[n].observation.messages[0]["content"] for n in numbers] == [f"0: text {n}" for n in numbers]
    assert all(event.turn.text == f"text {n}" for n, event in found.items())


def test_more_than_the_pipes_hold_goes_both_ways(play):
    """The pool sends all turns before it reads an answer."""
    plays, numbers = play("Long"), range(40)
    plays.start(*numbers)
    found = plays.step(dict.fromkeys(numbers, "y" * 100000))
    assert all(len(event.observation.messages[0]["content"]) == 500_000 for event in found.values())


def test_an_episode_that_ends_before_its_answer_is_closed_after_it(play, tmp_path):
    """As one that a round has cut: its environment may still work."""
    plays = play("Watched")
    plays.start(0)
    plays.pool.step(0, "a")
    assert wait_until((tmp_path / "works").exists)
    plays.pool.end(0)
    plays.start(1)  # the worker has read that the other one is to be closed
    assert not (tmp_path / "closed").exists()
    (tmp_path / "go").touch()
    assert plays.text(1, "b") == "0: b"
    assert wait_until((tmp_path / "closed").exists) and wait_until((tmp_path / "closed").read_text)
    assert (tmp_path / "closed").read_text() == "works: False"


def test_a_worker_with_a_thread_that_hangs_is_retired_also_when_its_episode_has_ended(play):
    plays = play("Neighbours", timeout=1.0)
    plays.start(0)
    (before,) = plays.processes()
    plays.pool.step(0, "stick")
    plays.pool.end(0)
    assert wait_until(lambda: not plays.pool.poll() and not plays.processes())
    plays.start(1)
    assert plays.text(1, "a") == "0: a" and plays.processes() != [before]


def test_a_worker_that_blocks_its_loop_is_replaced(play, tmp_path):
    """Its own limit cannot end a call that stops the event loop; the pool's can."""
    plays = play("LoopBlocker")
    plays.start(0, 1)
    assert plays.text(0, "free") == "0: free"
    plays.pool.step(0, "block")
    assert wait_until((tmp_path / "blocked").exists)
    # The pool gives such a worker more time than its calls have, as it may only be busy: here that time is over.
    plays.pool._episodes[0].deadline = 0.0
    event = plays.collect([0])[0]
    assert event.failure is None and event.observation.messages[0]["content"] == "1: block"
    assert (event.replayed, event.late) == (1, 1)
    assert plays.text(1, "still here") == "0: still here"


@pytest.mark.parametrize("is_async", [True, False])
def test_an_environment_that_times_out_itself_is_not_late(is_async):
    def plain():
        raise TimeoutError("a socket")

    async def coroutine():
        plain()

    with pytest.raises(TimeoutError, match="a socket"):
        asyncio.run(Worker(None, 60.0)._limited(coroutine if is_async else plain))
