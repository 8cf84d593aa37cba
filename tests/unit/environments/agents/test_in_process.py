"""The client of a coroutine agent, whose requests need no connection."""

import pytest

from tests.helpers.envs import odd_programs
from tests.helpers.envs.odd_agents import played


@pytest.mark.parametrize("name, reward, count", [
    (f"{odd_programs.HERE}:asks", 42.0, 1), ("asks_both_ways", 1.0, 6), ("times_out", 1.0, 1),
])  # fmt: skip
def test_requests_are_answered(name, reward, count, pool):
    assert len(played(pool, name, reward=reward)) == count
