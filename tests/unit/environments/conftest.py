"""Environments that a test plays, whose processes end with it."""

import pytest

from tests.helpers.envs.odd_environments import Plays


@pytest.fixture
def play(tmp_path, monkeypatch):
    monkeypatch.setenv("MEGARL_TEST_FOLDER", str(tmp_path))
    made = []

    def make(*args, **kwargs):
        made.append(Plays(*args, **kwargs))
        return made[-1]

    yield make
    for plays in made:
        plays.pool.close()
