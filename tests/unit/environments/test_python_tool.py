"""The Python tool: output, errors and limits of a program as texts for the policy."""

import pytest

from megarl.confine import sandbox
from megarl.confine.sandbox import Limits, Outcome
from megarl.environments import python_tool
from megarl.environments.protocol import Task
from megarl.environments.python_tool import MAX_OUTPUT, outcome_text, program_runner
from megarl.errors import UsageError
from tests.helpers.envs.played_environments import calling, play, said, written

pytestmark = pytest.mark.sandbox
EASY = Limits(60.0, 256, 1 << 16)  # for programs that end by themselves


def ran(code, limits=EASY):
    return program_runner(limits)(code)


def test_output_and_errors():
    assert ran("print(6 * 7)") == "42"
    assert ran("x = 1") == "(the program printed nothing)"
    failed = ran("print('so far')\n1 / 0")
    assert failed.startswith("so far\n") and failed.endswith("ZeroDivisionError: division by zero")
    assert "SyntaxError" in ran("print(") and "NameError" in ran("x")
    assert ran("import sys; sys.exit(3)") == "Error: the program failed without a message"
    assert ran("import os; os.write(1, b'\\xff')") == "\ufffd"


def test_limits_are_told():
    assert ran("while True: pass", Limits(0.4, 96, 1 << 16)) == "Error: the time limit ended the program"
    assert ran("print('a' * 100000)", Limits(60.0, 256, 5000)).endswith("Error: the limit of output ended the program")
    assert "memory" in ran("x = bytearray(1 << 30)", Limits(60.0, 128, 1 << 16)).lower()


def test_long_texts_are_cut_in_the_middle():
    text = ran("print('a' * 30000 + 'end')")
    assert text.startswith("aaa") and text.endswith("aend") and len(text) < MAX_OUTPUT + 60
    cut = 30003 - MAX_OUTPUT
    assert f"\n[... {cut} characters cut ...]\n" in text
    assert outcome_text(Outcome("ok", "b" * MAX_OUTPUT, "")) == "b" * MAX_OUTPUT


def test_a_program_sees_nothing_of_this_machine_or_of_earlier_programs():
    assert ran("open('/tmp/kept', 'w').write('1')") == "(the program printed nothing)"
    assert "FileNotFoundError" in ran("print(open('/tmp/kept').read())")
    assert "Error" in ran("import socket; socket.create_connection(('127.0.0.1', 80))")
    assert "FileNotFoundError" in ran("print(open('/etc/passwd').read())")


def test_an_episode(monkeypatch):
    monkeypatch.setattr(python_tool, "LIMITS", EASY)
    environment = python_tool.python_tool()
    assert environment.tools[0]["function"]["name"] == "python"
    turns = [calling(0, "python", code="print(2**10)"), *written("1024")]
    _, observations = play(environment, Task([], answer="1024"), turns)
    assert said(observations) == ["1024", ""] and observations[-1].done


def test_a_machine_without_a_sandbox_is_refused(monkeypatch):
    monkeypatch.setattr(sandbox, "available", lambda: "unshare: Operation not permitted")
    with pytest.raises(UsageError, match="the tool python: this machine allows no sandbox: unshare"):
        python_tool.python_tool()
