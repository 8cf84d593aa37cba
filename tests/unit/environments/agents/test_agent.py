"""How an agent's episode ends: with its score, its budget, its time or an error."""

import os
import signal

import pytest

from megarl.environments.calls import Asked
from megarl.environments.protocol import Task
from tests.helpers.envs.odd_agents import HERE, USER, play, pool_of


@pytest.mark.parametrize("name, reward", [("gives_up", 0.0), ("never_gives_up", 0.0)])
def test_an_agent_whose_budget_is_used_up_ends_as_it_stands(name, reward, pool):
    event, asks = play(pool, name, turns=2)
    assert event.failure is None and event.observation.reward == reward and not event.observation.correct
    assert len(asks) == (3 if name == "gives_up" else 18), "it is ended after 16 refused requests"


@pytest.mark.parametrize("name, said", [
    ("raises", "KeyError: 'of its own'"),
    ("says_text", "TypeError: an agent's score is a number or a Score, not 'good'"),
])  # fmt: skip
def test_what_fails_is_a_failure_in_a_line(name, said, pool):
    event, _ = play(pool, name)
    assert said in event.failure and not event.late


@pytest.mark.parametrize("name", ["sleeps", "repeats_what_is_refused"])
def test_an_agent_that_works_for_ever_is_late(name):
    pool = pool_of(timeout=0.2)
    try:
        event, _ = play(pool, name)
        assert event.failure == "the agent worked for more than 0.2 s without asking the policy" and event.late
    finally:
        pool.close()


def test_a_worker_that_dies_has_its_agent_run_again_under_another_ticket():
    pool = pool_of(retries=1)
    try:
        pool.start(0, Task(USER), f"{HERE}:gives_up")
        tickets = []
        while len(tickets) < 2:
            for event in pool.poll(1.0):
                assert isinstance(event, Asked)
                tickets.append(event.ticket)
                os.kill(pool._episodes[0].process.process.pid, signal.SIGKILL)
        assert len(set(tickets)) == 2
    finally:
        pool.close()
