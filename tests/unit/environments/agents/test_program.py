"""Programs as agents: how they end, and what cannot be run."""

import pytest

from megarl.environments.loading import check_factories
from megarl.errors import UsageError
from tests.helpers.envs.odd_agents import play
from tests.helpers.envs.odd_programs import HERE


@pytest.mark.parametrize("name", ["ends_at_once", "is_killed", "fills_the_disk", "prints_much"])
def test_a_program_is_scored_however_it_ends(name, pool):
    event, asks = play(pool, f"{HERE}:{name}")
    assert event.failure is None and event.observation.reward == 1.0 and not asks


def test_a_program_that_does_not_exist_is_wrong_input():
    with pytest.raises(UsageError, match="cannot be made: FileNotFoundError: there is no program no-such-program"):
        check_factories([f"{HERE}:missing"])
