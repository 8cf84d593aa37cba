"""Verifiers in confined processes of their own: one that died is replaced, and each ends with its caller."""

import os
import subprocess
import sys

import pytest

from megarl.confine import warm_process
from megarl.rewards.base import Sample, Score, ScoringError
from megarl.rewards.isolated import Isolated


def test_one_that_died_is_replaced():
    verify = Isolated("math-verify", 60.0)
    half = Sample("q", "$\\frac{1}{2}$", "0.5")
    assert verify(half) == Isolated("math-verify", 60.0)(half) == Score(1.0, True, {"math_verify": 1.0}, "1/2")
    process = warm_process._idle[os.getpid(), "math-verify"][0].process.process
    process.kill()
    process.wait()
    with pytest.raises((ScoringError, OSError)):
        verify(half)
    assert verify(half).correct


def test_it_ends_with_its_caller():
    program = """if True:
        from megarl.confine import warm_process
        from megarl.rewards.isolated import Isolated
        from megarl.rewards.base import Sample
        Isolated("math-verify", 60.0)(Sample("q", "1", "1"))
        (scorers,) = warm_process._idle.values()
        print(scorers[0].process.process.pid)
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=300)
    # It holds standard error, too, so that `run` has waited for its end.
    assert done.stdout.strip().isdigit()
