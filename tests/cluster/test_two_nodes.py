"""Two nodes on one machine: real Slurm, and two launchers. Nightly, as root."""

import subprocess
from pathlib import Path

import pytest

from tests.helpers.programs import environment

pytestmark = pytest.mark.nightly


@pytest.mark.parametrize("script", ["run_slurm", "run_torchrun"])
def test_a_run_on_two_nodes_is_that_of_one(script):
    command = ["bash", Path(__file__).with_name(f"{script}.sh")]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    if done.returncode == 2:  # the machine cannot have two nodes
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
