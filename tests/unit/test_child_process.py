"""Child processes of a rank under the signals that stop a run, which Slurm sends to all processes of a job."""

import importlib.util
import subprocess
import sys

import pytest

from megarl import child_process
from megarl.child_process import STOP_SIGNALS
from megarl.confine import sandbox, warm_process
from megarl.flags.settings import Settings
from megarl.rewards.base import Sample
from megarl.rewards.chosen_verifiers import build_verifiers
from tests.helpers.envs.odd_environments import Plays
from tests.helpers.processes import signalled_descendants
from tests.helpers.tiers import long

SUM = {"source_dataset": "chain_sum"}  # only compared: a child serves many responses
PUZZLE = {"source_dataset": "countdown", "target": 24, "numbers": [4, 6]}  # evaluated: a child for each response
PACKAGES = {"reasoning-gym": ["reasoning_gym"], "math-verify": ["math_verify"]}


@pytest.fixture(autouse=True)
def fresh_scorers(monkeypatch):
    """Those of earlier tests were born before the signals."""
    monkeypatch.setattr(warm_process, "_idle", {})
    monkeypatch.setattr(warm_process, "_doors", {})


@pytest.mark.parametrize(
    "reward", ["reasoning-gym", long("math-verify"), pytest.param("code", marks=pytest.mark.sandbox)]
)
def test_scores_are_those_of_a_run_without_signals(reward):
    if not all(map(importlib.util.find_spec, PACKAGES.get(reward, ()))):
        pytest.skip(f"needs {PACKAGES[reward][0]}")
    if reward == "code":
        tests = {"tests": [{"input": "1 2", "output": "3"}]}
        samples = [Sample("", f"print({text})", None, tests) for text in ("sum(map(int, input().split()))", 0)] * 4
    elif reward == "math-verify":
        samples = [Sample("", text, "15") for text in ("15", r"\boxed{30/2}", "16", "(" * 99)] * 8
    else:
        samples = [Sample("", text, "15", SUM) for text in ("15", "16")] * 20
        samples += [Sample("", text, "4*6", PUZZLE) for text in ("4*6", "4+6")] * 8
    with signalled_descendants() as reached:
        verifiers = build_verifiers(Settings(reward=reward))
        scores = verifiers.score(samples)
    assert reached and not any(verifiers.failures.values()) and not any(verifiers.timeouts.values())
    assert scores == build_verifiers(Settings(reward=reward)).score(samples)
    assert {score.correct for score in scores[reward]} == {True, False}
    verifiers.close()


def test_workers_and_environments_go_on(plug_ins, tmp_path, monkeypatch):
    monkeypatch.setenv("MEGARL_TEST_FOLDER", str(tmp_path))
    (plug_ins / "counted_rewards.py").write_text("def length(sample): return float(len(sample.response))\n")
    verifiers = build_verifiers(Settings(reward="counted_rewards:length", reward_workers=2))
    plays, numbers = Plays("Echo", workers=2, retries=0), range(4)
    try:
        with signalled_descendants() as reached:
            scores = verifiers.score([Sample("", "x" * length, None) for length in range(100)])
            plays.start(*numbers)
            for turn in range(20):
                found = plays.step(dict.fromkeys(numbers, str(turn)))
                assert {event.observation.messages[0]["content"] for event in found.values()} == {f"{turn}: {turn}"}
    finally:
        verifiers.close()
        plays.pool.close()
    assert [score.reward for score in scores["counted_rewards:length"]] == list(range(100))
    assert len(reached) >= 4


SHOW = f"import signal; print(*(signal.getsignal(n) == signal.SIG_DFL for n in {tuple(map(int, STOP_SIGNALS))}), "
SHOW += "*signal.pthread_sigmask(signal.SIG_BLOCK, ()))"


def test_programs_of_a_child_may_use_the_signals():
    """Python installs a handler of its own for SIGINT, unless the signal is ignored."""
    child = "import subprocess, sys; from megarl import child_process; "
    child += "child_process.outlive(); subprocess.run([sys.executable, '-c', sys.argv[1]], check=True)"
    with child_process.blocked():
        done = subprocess.run([sys.executable, "-c", child, SHOW], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True False True"


@pytest.mark.sandbox
def test_a_program_in_the_sandbox_can_end_its_own_children():
    """As `multiprocessing.Pool` does."""
    ends = "import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(999)'])"
    assert sandbox.run(f"{ends}\nchild.terminate(); print(child.wait())").stdout == "-15\n"
