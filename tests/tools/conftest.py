"""Fixtures of the tests of tools."""

import pytest

from tests.helpers.texts.small_prompts import SHORT, SUMS, make


@pytest.fixture(scope="module")
def sums(tmp_path_factory):
    """Folder with the prompt files of 360 small sums."""
    folder = tmp_path_factory.mktemp("sums")
    assert make(folder, *SUMS, *SHORT) == 0
    return folder
