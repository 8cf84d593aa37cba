"""Worker processes: each serves one job at a time; none shares anything, and none outlives its parent."""

import os
import signal
import socket
import subprocess
import sys

import pytest

from megarl.rewards.base import Sample, Score
from tests.helpers.waiting import SAFETY_SECONDS
from tests.helpers.worlds import wait_until_gone

FAILED = Score(-2.0, False)


def samples(*responses: str) -> list[Sample]:
    return [Sample("q", response, "a") for response in responses]


def test_seconds_of_calls_in_workers_are_known(build):
    verifiers = build("moody_rewards:moody+0*exact-match", 2)
    verifiers.score(samples("a", "b", "raise"))
    assert {*verifiers.seconds_of_calls} == {"moody_rewards:moody", "exact-match"}
    assert min(verifiers.seconds_of_calls.values()) > 0


def test_workers_share_nothing_and_leave_nothing(build, tmp_path):
    verifiers = build("moody_rewards:moody", workers=1)
    left, right = socket.socketpair()
    left.set_inheritable(True)
    with left, right:
        (score,) = verifiers.score(samples("who"))["moody_rewards:moody"]
        assert os.readlink(f"/proc/self/fd/{left.fileno()}") not in score.extracted.split()
    worker = int(score.reward)
    assert worker != os.getpid() and not score.correct  # torch is here, but not there
    assert len(score.extracted.split()) == 1  # the one that its jobs come from
    assert int(verifiers.score(samples("who"))["moody_rewards:moody"][0].reward) == worker
    note = tmp_path / "pid"
    assert verifiers.score([Sample(str(note), "start")])["moody_rewards:moody"] == [FAILED]
    assert wait_until_gone([worker, int(note.read_text())])  # what it had started went with it
    (again,) = verifiers.score(samples("who"))["moody_rewards:moody"]
    os.kill(int(again.reward), signal.SIGKILL)  # while it is idle: it has no sample to lose
    assert wait_until_gone([int(again.reward)])
    (third,) = verifiers.score(samples("who"))["moody_rewards:moody"]
    verifiers.close()
    assert wait_until_gone([int(third.reward)])


def test_workers_end_with_their_parent(build, tmp_path):
    program = f"""if True:
        import os, sys, threading, time
        sys.path.insert(0, {str(tmp_path)!r})
        from megarl.rewards.base import Job, Sample
        from megarl.rewards.chosen_verifiers import Options
        from megarl.rewards.verifier_workers import Workers
        options = Options(None, "", 1, None, 0, 1, 1, 9.0, 1)
        workers = Workers(2, (options, ["moody_rewards:moody"]))
        jobs = [Job("moody_rewards:moody", [Sample("q", text)], 600.0) for text in ("who", "who", "hang")]
        workers.run(jobs[:2])
        print(*(worker.process.pid for worker in workers._workers), flush=True)
        threading.Timer(0.2, os._exit, [0]).start()
        workers.run(jobs)
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=SAFETY_SECONDS)
    found = [int(number) for number in done.stdout.split()]
    assert len(found) == 2 and wait_until_gone(found), done.stderr  # an idle one, and one in its job


def test_a_worker_that_cannot_start(build, plug_ins):
    (plug_ins / "picky_rewards.py").write_text(
        f"import os\nif os.getpid() != {os.getpid()}: raise ValueError('not\\nhere')\ndef f(sample): return 1\n"
    )
    with pytest.raises(RuntimeError, match="did not start: UsageError: .*cannot import picky_rewards: ValueError: not"):
        build("picky_rewards:f", workers=2).score(samples("a", "b"))
