"""Programs in a sandbox: they reach the endpoint, their folder and /tmp, and nothing else; nothing of them is left."""

import socket

import pytest

from tests.helpers.envs.confined_agents import PORT
from tests.helpers.envs.odd_agents import play, pool_of
from tests.helpers.envs.odd_programs import MARK, marked
from tests.helpers.tiers import long
from tests.helpers.waiting import wait_until

HERE = "tests.helpers.envs.confined_agents"


@pytest.fixture(scope="module")
def secret(tmp_path_factory):
    path = tmp_path_factory.mktemp("outside") / "secret"
    path.write_text("secret")
    return path


@pytest.fixture(scope="module")
def pool(secret):
    """One for all: each program has a sandbox of its own."""
    with pytest.MonkeyPatch.context() as patch, socket.create_server(("127.0.0.1", 0)) as listener:
        patch.setenv(MARK, str(secret))
        patch.setenv(PORT, str(listener.getsockname()[1]))
        made = pool_of()
        try:
            yield made
        finally:
            made.close()


@pytest.mark.parametrize("name, turns", [
    ("asks", 1), ("explores", 0), ("linked", 0), ("fills_its_folder", 0), ("fills_the_memory", 0), ("forks", 0),
    long(("connects", 1)),
])  # fmt: skip
def test_a_program_can_do_what_it_may(name, turns, pool, secret):
    event, asked = play(pool, f"{HERE}:{name}")
    assert event.failure is None and len(asked) == turns
    assert event.observation.reward == (42.0 if name == "asks" else 1.0)
    assert wait_until(lambda: not marked(str(secret)))
