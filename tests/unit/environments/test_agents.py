"""Agents in a worker: every dialect with real clients, and whatever an agent may do, nothing of it goes further."""

import asyncio
import os
import signal

import pytest

from megarl.environments.agents.session import Session
from megarl.environments.calls import Ask, Asked, Reply
from megarl.environments.check import check_factories
from megarl.environments.protocol import Task
from megarl.environments.turn_parsing import parse_turn
from megarl.errors import UsageError
from tests.helpers.odd_agents import CALL, HERE, MARK, USER, marked, play, pool_of
from tests.helpers.serving import stderr_in
from tests.helpers.tiers import long
from tests.helpers.waiting import SAFETY_SECONDS, wait_until


@pytest.fixture(scope="module")
def pool():
    made = pool_of()
    yield made
    made.close()


@pytest.mark.parametrize("name, texts, count", [
    ("chats", [CALL, CALL], 4), ("responses", [CALL, "42", CALL], 3), ("messages", [CALL, "42", CALL], 3),
    ("strange_requests", [], 1), ("many_connections", [], 1), ("is_impatient", [], 1), ("asks", [], 1),
    ("asks_both_ways", [], 6), ("times_out", [], 1),
])  # fmt: skip
def test_requests_are_answered(name, texts, count, pool):
    event, asks = play(pool, name, texts)
    assert event.failure is None and event.is_agent and event.observation.done, event.failure
    assert event.observation.reward == {"chats": 0.5, "asks": 42.0}.get(name, 1.0)
    assert len(asks) == count
    if name in ("responses", "messages"):
        system, _, turn, result, *_ = asks[1].messages
        assert system == {"role": "system", "content": "be right"} and turn["content"] == "42"
        assert turn["tool_calls"][0]["function"] == {"name": "add", "arguments": {"x": [1, "ä"]}}
        assert (result["role"], result["name"], result["content"]) == ("tool", "add", "43")
        assert asks[1].max_tokens == 9 and asks[1].tools[0]["function"]["name"] == "add"
    if name in ("chats", "messages"):
        assert asks[-1].stops == (("7", "8") if name == "chats" else ("7",))


def test_an_agent_that_breaks_its_requests_off_leaves_no_lines(tmp_path):
    with stderr_in(tmp_path / "log"):
        pool = pool_of()
        try:
            event, asks = play(pool, "breaks_off", turns=999)
        finally:
            pool.close()
    assert event.failure is None and event.observation.reward == 1.0 and len(asks) > 5
    assert (tmp_path / "log").read_text() == ""


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


@pytest.mark.parametrize("name", ["ends_at_once", "is_killed", "fills_the_disk", "prints_much"])
def test_a_program_is_scored_however_it_ends(name, pool):
    event, asks = play(pool, name)
    assert event.failure is None and event.observation.reward == 1.0 and not asks


@pytest.mark.parametrize("name", ["leaves_daemons", long("hangs_with_daemons")])
def test_nothing_of_a_program_is_left(name, tmp_path, monkeypatch):
    monkeypatch.setenv(MARK, str(tmp_path))
    pool = pool_of(timeout=1.0 if name == "hangs_with_daemons" else SAFETY_SECONDS)
    try:
        event, _ = play(pool, name)
        assert (event.failure is None) == (name == "leaves_daemons")
        wait_until(lambda: not marked(str(tmp_path)))
    finally:
        pool.close()


def test_a_program_ends_with_its_worker(tmp_path, monkeypatch):
    monkeypatch.setenv(MARK, str(tmp_path))
    pool = pool_of()
    try:
        pool.start(0, Task(USER), f"{HERE}:hangs_with_daemons")
        wait_until(lambda: len(marked(str(tmp_path))) > 2 and pool.poll(0.01) == [])
        (process,) = pool._processes
        os.kill(process.process.pid, signal.SIGKILL)
        wait_until(lambda: not marked(str(tmp_path)))
        while not (events := pool.poll(1.0)):
            pass
        assert "its process ended" in events[0].failure
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


def test_a_program_that_does_not_exist_is_wrong_input():
    with pytest.raises(UsageError, match="cannot be made: FileNotFoundError: there is no program no-such-program"):
        check_factories([f"{HERE}:missing"])


def test_only_the_agents_own_work_counts_as_its_time(monkeypatch):
    async def played() -> list[float]:
        now, loop, seen = [0.0], asyncio.get_running_loop(), []
        monkeypatch.setattr(loop, "time", lambda: now[0])
        session = Session(lambda number, ask: None)
        now[0] = 2.0
        asked = asyncio.create_task(session.ask(Ask(USER)))
        await asyncio.sleep(0)
        now[0] = 10.0  # the policy writes
        seen.append(session.worked_seconds)
        session.receive(0, Reply(parse_turn("42", 0)))
        await asked
        now[0] = 13.0
        return [*seen, session.worked_seconds]

    assert asyncio.run(played()) == [2.0, 5.0]
