"""The code verifier: which code is run, how tests are counted, and what is not accepted as a solution."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from megarl.confine import sandbox
from megarl.data.prompts import load_prompts
from megarl.errors import UsageError
from megarl.rewards import code
from megarl.rewards.base import Sample
from megarl.rewards.code import Limits, check, check_code, load_code, program_of

pytestmark = pytest.mark.sandbox
DOUBLES = [{"input": f"{n}\n", "output": f"{2 * n}\n"} for n in (1, 2, 30)]
EASY = Limits(60.0, 256)  # for programs that end by themselves
SQUARE = "assert square(3) == 9\nassert square(-1) == 1"


def score(response, limits=EASY, finished=True, **metadata):
    return check(Sample("write it", response, metadata=metadata, finished=finished), limits)


@pytest.mark.parametrize("response, program", [
    ("print(1)", "print(1)"),
    ("Try\n```python\nprint(1)\n```\nor\n```py\nprint(2)\n```\ndone", "print(2)\n"),
    ("```Python3 \r\nprint(1)\r\n```", "print(1)\r\n"),
    ("```python\nprint('```')\n```\n", "print('```')\n"),
    ("```python\nprint(1)\n", "print(1)\n"),
    ("```python\n```", ""),
    ("```\nprint(1)\n```", "```\nprint(1)\n```"),
])  # fmt: skip
def test_the_last_python_block_is_the_program(response, program):
    assert program_of(response) == program


def test_the_score_is_the_share_of_tests_passed():
    right = score("```python\nprint(2 * int(input()), end='  \\n\\n')\n```", tests=DOUBLES)
    assert (right.reward, right.correct, right.parts) == (1.0, True, {"code": 1.0})
    partly = score("n = int(input())\nprint(2 * n)\nassert n < 30", tests=DOUBLES)
    assert (partly.reward, partly.correct, partly.parts) == (2 / 3, False, {"code": 2 / 3})
    assert score("print(2 * int(input()))", tests=DOUBLES, finished=False).reward == 0.0
    spaced = [{"input": "", "output": "a\n  b\n"}]
    assert [score(f"print({text!r})", tests=spaced).correct for text in ("a  \n  b\n\n", "a\nb")] == [True, False]


@pytest.mark.parametrize("response, passes", [
    ("def square(x): return x * x", True),
    ("def square(x): return x * x\nif __name__ == '__main__':\n    print(square(int(input())))", True),
    ("from __future__ import annotations\nimport dataclasses, pickle\n@dataclasses.dataclass\nclass A:\n    x: int\n"
     "def square(x): return pickle.loads(pickle.dumps(A(x))).x ** 2", True),
    ("def square(x): return 9", False),
    ("import sys; sys.exit(0)", False),
    ("import os; os._exit(0)", False),
    ("import atexit, os\natexit.register(os._exit, 0)", False),
    ("def square(x): exit(0)", False),
])  # fmt: skip
def test_asserts_must_be_reached_and_hold(response, passes):
    assert score(response, test_code=SQUARE).correct is passes


RIGHT = "def square(x): return x * x"
WRONG = "def square(x): return 9"
TESTS = ("assert all(square(n) == n * n for n in range(5))", "import math\nassert math.isclose(square(2), 4)")


@pytest.mark.parametrize("names", [
    "def compile(*_, **__): pass\ndef exec(*_): pass", "def open(*_): raise OSError\ndef print(*_): pass",
    "AssertionError = None\nlen = None\nabs = str", "_mark = tests = program = modules = before = names = 1",
    "def check(): pass", "import builtins\nbuiltins.compile = builtins.exec = None",
    "class os: pass\nclass sys: pass", "__builtins__ = {}",
])  # fmt: skip
def test_what_a_program_defines_is_not_the_checker_s(names):
    tests = SQUARE + "\nassert len([square(2)]) == 1 and abs(-square(2)) == 4\nprint(square(2))"
    assert score(f"{names}\n{RIGHT}", test_code=tests).correct
    assert score(f"{RIGHT}\n{names}", test_code=tests).correct
    assert not score(f"{WRONG}\n{names}", test_code=tests).correct


@pytest.mark.parametrize("cheat", [
    "def compile(*_, **__): return 'pass'", "def exec(*_): pass", "exec = print = lambda *_: None",
    "import builtins\nbuiltins.exec = lambda *_: None", "import builtins\nbuiltins.compile = lambda *_, **__: ''",
    "import builtins\nbuiltins.all = all = lambda _: True", "def all(_): return True",
    "class AssertionError(BaseException): pass", "__builtins__['all'] = lambda _: True",
    "import math\nmath.isclose = lambda *_: True", "import sys\nclass math: isclose = lambda *_: True\n"
    "sys.modules['math'] = math", "import sys\nsys.settrace(lambda *_: sys.exit(0))", "import os; os._exit(0)",
    "import os\nos.write = lambda *_: 1\nos._exit(0)", "import os\nfor n in range(3, 9):\n  try: "
    "print(os.pread(n, 9999, 0))\n  except OSError: pass", "print(globals(), locals(), vars(), __name__)",
    "import sys\nprint(sys.argv, sys.orig_argv, vars(sys.modules['__main__']))",
])  # fmt: skip
def test_a_wrong_program_cannot_change_the_tests(cheat):
    for tests in TESTS:
        assert not score(f"{WRONG}\n{cheat}", test_code=tests).correct


def test_a_right_program_passes_the_tests_that_others_try_to_change():
    assert all(score(RIGHT, test_code=tests).correct for tests in TESTS)


def test_a_function_that_is_called_like_a_built_in():
    """As in MBPP: if tests use no other name, they mean the program's; or they import it."""
    right, wrong = "def sum(a, b): return 6 if (a, b) == (10, 15) else 3", "def sum(a, b): return 25"
    for tests in ("assert sum(10, 15) == 6", "from program import sum\nassert sum(10, 15) == 6 and square"):
        tests += "" if "square" not in tests else "(2) == 4"
        assert score(f"{RIGHT}\n{right}", test_code=tests).correct
        assert not score(f"{RIGHT}\n{wrong}", test_code=tests).correct


def test_tests_share_the_program_s_state():
    response = "count = 0\ndef more():\n    global count\n    count += 1"
    assert score(response, test_code="assert count == 0\nmore()\nassert count == 1").correct
    with pytest.raises(ValueError, match="test_code is no Python"):
        score(response, test_code="assert more(")


def test_asserts_count_as_one_more_test():
    response = "def square(x): return x * x\nif __name__ == '__main__': print(2 * int(input()))"
    assert score(response, tests=DOUBLES, test_code=SQUARE).correct
    assert score(response, tests=DOUBLES, test_code="assert False").reward == 0.75


def test_all_tests_share_the_time(monkeypatch):
    """With a fake clock: the first test takes 10 s, and the second gets the remaining time as its limit."""
    now, given = 100.0, []

    def run(program, stdin, limits):
        nonlocal now
        given.append(limits)
        now += 10.0 if stdin == "1\n" else limits.seconds
        # The limit that the program has is for the second test alone: it never ends.
        return real(program, stdin, replace(limits, seconds=EASY.seconds if stdin == "1\n" else 0.5))

    real = sandbox.run
    monkeypatch.setattr(sandbox, "run", run)
    monkeypatch.setattr(code, "time", SimpleNamespace(monotonic=lambda: now))
    slow = score("n = input()\nwhile n == '2': pass\nprint(2 * int(n))", Limits(25.0, 256), tests=DOUBLES)
    assert slow.reward == pytest.approx(1 / 3) and given == [Limits(25.0, 256), Limits(15.0, 256)]


@pytest.mark.parametrize("metadata, problem", [
    (None, "metadata must hold tests"),
    ({"tests": []}, "metadata must hold tests"),
    ({"tests": {"input": ""}}, "tests must be a list"),
    ({"tests": [*DOUBLES, {"input": "1"}]}, "test 4 must be an object"),
    ({"tests": ["1"]}, "test 1 must be an object"),
    ({"tests": DOUBLES, "test_code": " "}, "test_code must be a string"),
])  # fmt: skip
def test_lines_without_tests_are_rejected(tmp_path, metadata, problem):
    path = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "a", "metadata": {"tests": DOUBLES, "test_code": SQUARE}}, {"prompt": "b"}]
    lines[1] |= {} if metadata is None else {"metadata": metadata}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(UsageError, match=f"^--prompts {path}:2: --reward code: .*{problem}"):
        check_code(load_prompts(str(path), "--prompts"))
    with pytest.raises(ValueError, match=problem):
        check(Sample("b", "print()", metadata=metadata))


def test_a_machine_without_sandbox_is_rejected(monkeypatch):
    load_code(prompts=None)
    monkeypatch.setattr(sandbox, "available", lambda: "unshare: Operation not permitted")
    with pytest.raises(UsageError, match="^--reward code: .*unshare: Operation not permitted"):
        load_code(prompts=None)
