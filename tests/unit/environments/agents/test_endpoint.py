"""Whatever an agent sends to its endpoint, nothing of it goes further."""

import pytest

from tests.helpers.envs.odd_agents import play, played, pool_of
from tests.helpers.server.serving import stderr_in


@pytest.mark.parametrize("name", ["strange_requests", "many_connections", "is_impatient"])
def test_requests_are_answered(name, pool):
    assert len(played(pool, name)) == 1


def test_an_agent_that_breaks_its_requests_off_leaves_no_lines(tmp_path):
    with stderr_in(tmp_path / "log"):
        pool = pool_of()
        try:
            event, asks = play(pool, "breaks_off", turns=999)
        finally:
            pool.close()
    assert event.failure is None and event.observation.reward == 1.0 and len(asks) > 5
    assert (tmp_path / "log").read_text() == ""
