"""Flags without effect: one line on stderr of rank 0, once however a program is started."""

import gc
import sys

import pytest

from megarl import launcher
from megarl.errors import WARNED
from megarl.trainers import launch
from tests.helpers.programs import rl_argv

IDLE = "--advantage grpo --gae-lambda 0.9 --critic-lr 1e-3"
WARNING = ("megarl: warning: without effect: --gae-lambda (--advantage grpo does not use them); --critic-lr "
           "(--advantage grpo needs no critic)\n")  # fmt: skip


@pytest.fixture(autouse=True)
def variables(monkeypatch):
    """Those that a program or its launcher sets come to their end with the test."""
    for name, value in ((WARNED, ""), ("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "a"), ("MASTER_PORT", "9")):
        monkeypatch.setenv(name, value)
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(sys, "argv", sys.argv)


def launched(argv: list[str], rank: int, monkeypatch) -> list[str]:
    """Names of the roles that a program gets which is started with these flags."""
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setattr(sys, "argv", ["megarl.train_rl", *argv])
    found = []
    launch.launch(lambda program, timers: found.extend(program.roles), "rl")
    return found


def test_rank_0_warns_and_the_run_continues(tmp_path, monkeypatch, capfd):
    argv = rl_argv(tmp_path, IDLE)
    for rank, expected in ((0, WARNING), (1, "")):
        assert "critic" not in launched(argv, rank, monkeypatch)
        assert capfd.readouterr() == ("", expected)


def test_no_warning_is_repeated_or_needless(tmp_path, monkeypatch, capfd):
    launched(rl_argv(tmp_path, "--advantage grpo"), 0, monkeypatch)
    monkeypatch.setenv(WARNED, "1")
    launched(rl_argv(tmp_path, IDLE), 0, monkeypatch)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("size, rest", [(5, 2), (8, 4), (4, None), (12, None)])
def test_an_uneven_last_mini_batch_is_told(size, rest, tmp_path, monkeypatch, capfd):
    """Of 6 prompts with 2 samples; a size of 8 is one of whole groups."""
    launched(rl_argv(tmp_path, f"--advantage grpo --minibatch-size {size}"), 0, monkeypatch)
    line = (f"megarl: warning: --minibatch-size {size}: the last mini-batch of a step has {rest} responses instead of "
            f"{size}, and is an update like the others\n")  # fmt: skip
    assert capfd.readouterr() == ("", line if rest else "")


@pytest.mark.usefixtures("own_environment")
@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("node, times", [("0", 1), ("1", 0)])
def test_the_launcher_warns_once(node, times, tmp_path, monkeypatch, capfd):
    """Its check does, on the first node; the ranks, which read the flags again, do not. One says what it understood."""
    monkeypatch.setenv(WARNED, "1")  # of a launcher around this one
    monkeypatch.setattr(launcher, "can_fork", lambda: True)
    monkeypatch.setattr(launcher, "run_ranks", lambda function, *_: function())
    monkeypatch.setattr(gc, "freeze", lambda: None)
    argv = ["--nproc-per-node", "2", "--node-rank", node, "train_rl", *rl_argv(tmp_path, f"{IDLE} --check")]
    assert launcher.main(argv) == 0
    printed = capfd.readouterr()
    assert printed.err.count(WARNING) == times and printed.out.count("megarl: all input is valid for 2 ranks") == 1
