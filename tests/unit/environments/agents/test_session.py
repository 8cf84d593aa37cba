"""The time of an agent."""

import asyncio

from megarl.environments.agents.session import Session
from megarl.environments.calls import Ask, Reply
from megarl.environments.protocol import parse_turn
from tests.helpers.envs.odd_agents import USER


def test_only_the_agents_own_work_counts_as_its_time(monkeypatch):
    async def played() -> list[float]:
        now, loop, seen = [0.0], asyncio.get_running_loop(), []
        monkeypatch.setattr(loop, "time", lambda: now[0])
        session = Session(lambda number, ask, images: None)
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
