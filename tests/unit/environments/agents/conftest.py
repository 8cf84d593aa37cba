"""A worker that all tests of agents share."""

import pytest

from tests.helpers.envs.odd_agents import pool_of


@pytest.fixture(scope="package")
def pool():
    made = pool_of()
    yield made
    made.close()
