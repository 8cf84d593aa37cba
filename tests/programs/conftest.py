"""Fixtures of tests of whole programs."""

import pytest


@pytest.fixture(scope="session")
def emulator():
    """A process with emulated devices, which runs one program after another."""
    from tests.emulator.programs import Emulator

    found = Emulator()
    yield found
    found.close()
