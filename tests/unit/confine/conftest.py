"""What programs in sandboxes must leave as it is."""

import gc
import os
import resource
from pathlib import Path

import pytest

from megarl.confine import sandbox
from tests.helpers.processes import descendants


def outside():
    limits = [resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")]
    variables = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    mounts = Path("/proc/self/mountinfo").read_text()
    return set(descendants(os.getpid())), limits, variables, os.getcwd(), os.listdir("/proc/self/fd"), mounts


@pytest.fixture
def nothing_outside_changes():
    assert sandbox.available() is None
    gc.collect()  # files that earlier tests left to the collector
    before = outside()
    yield
    assert outside() == before
