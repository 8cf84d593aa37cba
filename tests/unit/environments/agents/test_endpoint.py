"""Whatever an agent sends to its endpoint, nothing of it goes further."""

import pytest

from tests.helpers.envs.odd_agents import play, pool_of
from tests.helpers.server.serving import stderr_in


@pytest.mark.parametrize(
    "name, reward, count", [("strange_requests", 1.0, 1), ("many_connections", 1.0, 1), ("is_impatient", 1.0, 1)]
)
def test_requests_are_answered(name, reward, count, pool):
    event, asks = play(pool, name)
    assert event.failure is None and event.is_agent and event.observation.done, event.failure
    assert event.observation.reward == 1.0 and len(asks) == 1


def test_an_agent_that_breaks_its_requests_off_leaves_no_lines(tmp_path):
    with stderr_in(tmp_path / "log"):
        pool = pool_of()
        try:
            event, asks = play(pool, "breaks_off", turns=999)
        finally:
            pool.close()
    assert event.failure is None and event.observation.reward == 1.0 and len(asks) > 5
    assert (tmp_path / "log").read_text() == ""
