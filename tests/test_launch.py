"""launch/run.sh: wrong use ends with status 2 and one line, right use starts the ranks."""

import subprocess
import sys

import pytest

from tests.programs import ROOT, environment, metrics, sft_argv


def launch(arguments: list[str], **variables: str) -> subprocess.CompletedProcess:
    """Runs the script in the environment that the tests run in."""
    command = ["bash", str(ROOT / "launch" / "run.sh"), *arguments]
    env = environment(MEGARL_VENV=sys.prefix, **variables)
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("arguments, variables, says", [
    ([], {}, "name a program"), (["train"], {}, "no program train"), (["train_sft"], {"NPROC": "0"}, "NPROC=0"),
    (["train_sft"], {"NPROC": "two"}, "NPROC=two"), (["train_sft", "--lr-rate", "1"], {}, "--lr-rate"),
])  # fmt: skip
def test_wrong_use_is_told_in_one_line(arguments, variables, says):
    done = launch(arguments, **variables)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr and len(done.stderr.splitlines()) == 1


def test_it_starts_the_ranks(tmp_path):
    done = launch(["train_sft", *sft_argv(tmp_path, "--train-iters 3")], NPROC="2")
    assert done.returncode == 0, done.stderr
    assert sorted(metrics(tmp_path)) == [1, 2, 3]
