"""What is checked of environments: a template whose calls nothing reads is refused or said, never ignored."""

import pytest

from megarl.errors import UsageError
from megarl.trainers.environment_inputs import check_environments
from tests.helpers.programs import program, rl_argv
from tests.helpers.texts.chat_encoders import encoder_of
from tests.helpers.texts.small_tokenizers import PYTHONIC, chatml

PROBLEM = "--tool-call-parser auto: no format reads the calls that --chat-template writes; name one of hermes,"


def checked(tmp_path, environment: str):
    settings = program("rl", rl_argv(tmp_path / "run", f"--environment {environment} --max-turns 2"), 1).settings
    check_environments(settings, encoder_of(tmp_path / "tokenizer", chatml, PYTHONIC), {})


def test_agents_hear_that_no_call_would_be_read(tmp_path, capfd):
    checked(tmp_path, "tests.helpers.envs.agents:sums")
    (line,) = (line for line in capfd.readouterr().err.splitlines() if line.startswith("megarl: "))
    assert line.startswith(f"megarl: warning: {PROBLEM}") and line.endswith("or a function, if agents offer tools")


def test_environments_with_tools_are_refused(tmp_path):
    with pytest.raises(UsageError, match=PROBLEM):
        checked(tmp_path, "calculator")
