"""Processes that answer in confined children: none is shared with a fork, one that died is replaced, none is left."""

import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe

import pytest

from megarl.confine import warm_process
from megarl.confine.warm_process import Children
from megarl.rewards.base import Score
from megarl.rewards.isolated import Scorer
from tests.helpers.waiting import SAFETY_SECONDS

MODULE, NAME = "tests.helpers.envs.quick_answers", "lengths"


@pytest.fixture(autouse=True)
def processes(monkeypatch):
    """None at the beginning, and none that is left."""
    monkeypatch.setattr(warm_process, "_idle", {})
    monkeypatch.setattr(warm_process, "_doors", {})
    yield
    for process in warm_process._idle.get((os.getpid(), NAME), []):
        process.end()


def is_answered(text: str = "abc") -> bool:
    return warm_process.ask(MODULE, NAME, {"text": text}) == {"length": len(text)}


def fork_asks() -> list[bool]:
    """In a forked process: whether the answer is right, and whether a fork of an earlier process has given it."""
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            is_right = is_answered()
            process = warm_process._idle[os.getpid(), NAME][0]
            os.write(write, json.dumps([is_right, process.process is None]).encode())
            process.end()
        finally:
            os._exit(0)
    os.close(write)
    with open(read) as stream:
        found = json.load(stream)
    os.waitpid(child, 0)
    return found


def test_each_process_has_one_of_its_own_and_one_that_died_is_replaced():
    assert is_answered()
    mine = warm_process._idle[os.getpid(), NAME][0]
    assert fork_asks() == [True, True]  # of a fork of the warm process
    assert is_answered() and warm_process._idle[os.getpid(), NAME] == [mine]
    mine.process.process.kill()
    mine.process.process.wait()
    assert fork_asks() == [True, False]  # of a process of its own, since that one has ended
    with pytest.raises((warm_process.NoAnswer, OSError)):
        is_answered()
    assert is_answered()


def test_a_process_that_was_begun_answers_the_first_request(monkeypatch):
    for _ in range(2):
        warm_process.begin(MODULE, NAME)
    (begun,) = warm_process._idle[os.getpid(), NAME]
    monkeypatch.setattr(warm_process, "_start", None)
    assert is_answered() and warm_process._idle[os.getpid(), NAME] == [begun]


def test_threads_share_one_warm_process(monkeypatch):
    started, start = [], warm_process._start
    monkeypatch.setattr(warm_process, "_start", lambda module, name: started.append(name) or start(module, name))
    barrier, real_ask = threading.Barrier(3), warm_process._Process.ask

    def ask(process, request):  # all three have one before one of them asks
        barrier.wait(timeout=SAFETY_SECONDS)
        return real_ask(process, request)

    monkeypatch.setattr(warm_process._Process, "ask", ask)
    with ThreadPoolExecutor(3) as threads:
        assert all(threads.map(is_answered, ["a", "", "abc"]))
    assert started == [NAME] and len(warm_process._idle[os.getpid(), NAME]) == 3


def test_it_ends_with_its_caller():
    program = f"""if True:
        from megarl.confine import warm_process
        warm_process.ask({MODULE!r}, {NAME!r}, {{"text": ""}})
        (processes,) = warm_process._idle.values()
        print(processes[0].process.process.pid)
    """
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=SAFETY_SECONDS
    )
    # It holds standard error, too, so that `run` has waited for its end.
    assert done.stdout.strip().isdigit()


CALLER = Pipe()  # the connection of a caller that never hangs up


class Hostile:
    """In place of a verifier's module: runs what the response says, as a scorer that is taken over would."""

    WRONG = Score(0.0, False, {"part": 0.0})

    @staticmethod
    def score_inside(sample):
        exec(sample.response)
        return Score(0.5, False)

    @staticmethod
    def prepare(metadata):
        return 0 if metadata else None


HOSTILE = Scorer(Hostile)


def answer(response, reference="pass", seconds=20.0, shared=None):
    """The answer to a request; `shared`: the children whose shared one scores it, instead of one of its own."""
    metadata = {} if shared is None else {"shared": True}
    sample = {"prompt": "", "response": response, "answer": reference, "metadata": metadata, "finished": True}
    return HOSTILE.answer({"sample": sample, "seconds": seconds}, shared or hostile_children())


def hostile_children():
    return Children(HOSTILE, CALLER[0].fileno())


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
    shared, right = hostile_children(), {"reward": 0.5, "correct": False, "parts": {}, "extracted": None}
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
