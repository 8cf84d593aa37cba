"""Scoring in confined processes: what they cannot do, how they end, and that none is shared with a fork."""

import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe

import pytest

from megarl.rewards import compute_only, isolated, tasks
from megarl.rewards.base import Sample, Score, ScoringError
from megarl.rewards.isolated import Isolated
from megarl.rewards.scorer import Scorer

CALLER = Pipe()  # the connection of a caller that never hangs up
SUM = Sample("7 + 8 =", "15", "15", {"source_dataset": "chain_sum"})


def test_a_confined_process_can_only_compute():
    assert compute_only.works() is None


def test_a_filter_that_does_not_hold_is_noticed(monkeypatch):
    monkeypatch.setattr(compute_only, "_filter_calls", lambda *_: None)
    assert "a process could be started" in compute_only.works()
    monkeypatch.setattr(compute_only, "_ALLOWED", {})
    assert "no list of system calls" in compute_only.works()


class Hostile:
    """In place of a verifier's module: runs what the response says, as a scorer that is taken over would."""

    WRONG = Score(0.0, False, {"part": 0.0})

    @staticmethod
    def score_inside(sample):
        exec(sample.response)
        return Score(0.5, False)

    @staticmethod
    def prepare(metadata):
        pass

    @staticmethod
    def prepared():
        return 0

    @staticmethod
    def may_share(metadata):
        return bool(metadata)


def answer(response, reference="pass", seconds=20.0, shared=None):
    """The answer to a request; `shared`: the scorer in whose shared child it is scored, instead of one of its own."""
    metadata = {} if shared is None else {"shared": True}
    sample = {"prompt": "", "response": response, "answer": reference, "metadata": metadata, "finished": True}
    return (shared or hostile_scorer()).answer({"sample": sample, "seconds": seconds})


def hostile_scorer():
    return Scorer(Hostile, CALLER[0].fileno())


@pytest.mark.parametrize("response", [
    "raise ValueError", "raise SystemExit", "raise KeyboardInterrupt", "import os; os._exit(0)", "bytearray(1 << 33)",
    "import ctypes; ctypes.string_at(0)", "import os, signal; os.kill(os.getppid(), signal.SIGKILL)",
    "import os; os.fork()", "import subprocess; subprocess.run(['true'])", "open('/tmp/megarl-none', 'w')",
    "import socket; socket.socket()",
    "import os; [os.write(n, b'{\"score\": NaN}') for n in range(3, 99) if os.path.exists(f'/proc/self/fd/{n}')]",
    "import os; os.rename('/tmp/a', '/tmp/b')", "import os; os.chmod('/tmp', 0)", "import threading as t; "
    "t.Thread(target=print).start()", "raise Exception('\\ud800' * 9999)",
])  # fmt: skip
def test_what_a_response_does_is_a_wrong_answer(response):
    assert answer(response) == {"score": {"reward": 0.0, "correct": False, "parts": {"part": 0.0}, "extracted": None,
                                          "timed_out": False, "abstains": False}}  # fmt: skip
    assert not os.path.exists("/tmp/megarl-none")


def test_a_child_that_many_responses_share_is_replaced_when_it_fails(tmp_path):
    shared, right = hostile_scorer(), {"reward": 0.5, "correct": False, "parts": {}, "extracted": None}
    seen = []
    for response in ("pass", "pass", "raise ValueError", "pass", "import os; os._exit(0)", "pass", "while True: pass"):
        found = answer(response, seconds=20.0 if response != "while True: pass" else 0.5, shared=shared)["score"]
        seen.append((shared._shared and shared._shared[0], found["reward"], found["timed_out"]))
        if response == "pass":
            assert found == {**right, "timed_out": False, "abstains": False}
    pids, rewards, late = zip(*seen, strict=True)
    assert rewards == (0.5, 0.5, 0.0, 0.5, 0.0, 0.5, 0.0) and late == (*[False] * 6, True)
    assert pids[0] == pids[1] != pids[3] != pids[5]
    assert answer("open('/tmp/megarl-none', 'w')", shared=shared)["score"]["reward"] == 0.0
    shared.end_shared_child()


def test_what_a_child_says_is_checked():
    for text in ('{"score": {"reward": 7.0, "correct": true, "parts": {}, "extracted": null}}', "[" * 99999, "{}", "7"):
        response = f"import os\nfor n in range(3, 64):\n  try: os.write(n, {text!r}.encode())\n  except OSError: pass"
        assert answer(response + "\nos._exit(0)")["score"]["reward"] == 0.0


@pytest.mark.long
def test_a_response_that_never_ends_is_wrong_and_a_reference_that_does_not_is_a_failure():
    assert answer("while True: pass", seconds=2.0)["score"]["timed_out"]
    assert answer("while True: pass", "while True: pass", 0.5) == {"problem": "no result within 0.5 s", "late": True}
    assert answer("1 / 0", "1 / 0")["problem"] == "ZeroDivisionError: division by zero"


def test_nothing_of_a_response_stays():
    keep = "import builtins\nif hasattr(builtins, 'x'): raise ValueError\nbuiltins.x = 1"
    assert [answer(keep)["score"]["reward"] for _ in range(2)] == [0.5, 0.5]


def test_each_process_has_scorers_of_its_own():
    verify = tasks.reasoning_gym(60.0)
    assert verify(SUM).correct
    mine = isolated._idle[os.getpid(), "reasoning-gym"][0]
    assert fork_verifies(verify) == [True, True]  # a fork of the warm process
    assert verify(SUM).correct and isolated._idle[os.getpid(), "reasoning-gym"] == [mine]
    mine.process.process.kill()
    mine.process.process.wait()
    assert fork_verifies(verify) == [True, False]  # a process of its own, since that one has ended
    with pytest.raises((ScoringError, OSError)):
        verify(SUM)
    assert verify(SUM).correct


def fork_verifies(verify):
    """In a forked process: whether a sum is correct, and whether a fork of an earlier process has scored it."""
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            is_correct = verify(SUM).correct
            scorer = isolated._idle[os.getpid(), "reasoning-gym"][0]
            os.write(write, json.dumps([is_correct, scorer.process is None]).encode())
            scorer.end()
        finally:
            os._exit(0)
    os.close(write)
    with open(read) as stream:
        found = json.load(stream)
    os.waitpid(child, 0)
    return found


def test_threads_share_one_warm_process(monkeypatch):
    monkeypatch.setattr(isolated, "_idle", {})
    monkeypatch.setattr(isolated, "_doors", {})
    started = []
    monkeypatch.setattr(isolated, "_start", lambda name, start=isolated._start: started.append(name) or start(name))
    verify, barrier = Isolated("reasoning-gym", 60.0), threading.Barrier(3)
    real_ask = isolated._Scorer.ask

    def ask(scorer, request):  # all three have a scorer before one of them asks
        barrier.wait(timeout=60)
        return real_ask(scorer, request)

    monkeypatch.setattr(isolated._Scorer, "ask", ask)
    with ThreadPoolExecutor(3) as threads:
        assert all(score.correct for score in threads.map(verify, [SUM] * 3))
    assert started == ["reasoning-gym"] and len(isolated._idle[os.getpid(), "reasoning-gym"]) == 3


def test_one_that_died_is_replaced():
    verify = Isolated("math-verify", 60.0)
    half = Sample("q", "$\\frac{1}{2}$", "0.5")
    assert verify(half) == Isolated("math-verify", 60.0)(half) == Score(1.0, True, {"math_verify": 1.0}, "1/2")
    process = isolated._idle[os.getpid(), "math-verify"][0].process.process
    process.kill()
    process.wait()
    with pytest.raises((ScoringError, OSError)):
        verify(half)
    assert verify(half).correct


def test_it_ends_with_its_caller():
    program = """if True:
        from megarl.rewards import isolated
        from megarl.rewards.base import Sample
        isolated.Isolated("math-verify", 60.0)(Sample("q", "1", "1"))
        (scorers,) = isolated._idle.values()
        print(scorers[0].process.process.pid)
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=300)
    # It holds standard error, too, so that `run` has waited for its end.
    assert done.stdout.strip().isdigit()
