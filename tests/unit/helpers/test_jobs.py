"""Processes that share the tests of a run: all of them report, and a failure in any of them is one of the run."""

import os
import subprocess
import sys

import pytest

from tests.helpers.programs import ROOT

MEETING = """
import os
from pathlib import Path
from tests.helpers.processes import descendants
from tests.helpers.waiting import wait_until

def test_meets():
    here = Path(__file__).parent
    assert not descendants(os.getpid())  # the other process is none of its own
    (here / "{name}").touch()
    assert wait_until((here / "{other}").exists)  # so another process runs the other file
    print("printed by {name}")
    assert "{name}" == "", "planted in {name}"

def test_stays():  # a process claims the next file before the last test of one
    pass
"""


@pytest.mark.long
def test_what_fails_in_another_process_fails_the_run(tmp_path):
    for name, other in ("ab", "ba"):
        (tmp_path / f"test_{name}.py").write_text(MEETING.format(name=name, other=other))
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "tests.conftest", "--jobs", "2"]
    done = subprocess.run(
        [*command, str(tmp_path)], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert done.stdout.count("1 failed, 1 passed in") == 2 and "a process of --jobs ended with status 1" in done.stdout
    for name in "ab":
        assert f"planted in {name}" in done.stdout and done.stdout.count(f"\nprinted by {name}\n") == 1
