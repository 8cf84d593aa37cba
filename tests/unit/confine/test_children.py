"""What responses do to the confined children that score them: nothing that stays, and nothing but a wrong answer."""

import os
from multiprocessing import Pipe

import pytest

from megarl.confine.children import Children
from megarl.rewards.base import Score
from megarl.rewards.isolated import Scorer

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
