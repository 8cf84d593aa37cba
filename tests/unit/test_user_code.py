"""Errors in the user's code: their place, their traceback, and rewards that are written for another framework."""

import sys
import traceback

import pytest

from megarl import plugins
from megarl.errors import TooManyFailures, UsageError
from megarl.flags.settings import Settings
from megarl.rewards import guard
from megarl.rewards.base import Sample, Verifier
from megarl.rewards.chosen_verifiers import build_verifiers

PLUG_IN = """
import json

def deep(sample):
    return json.loads(sample.response)

def reward(sample):
    return deep(sample)

def of_verl(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0

def of_trl(completions, **kwargs):
    return [1.0]

def of_openrlhf(queries, prompts, labels):
    return 1.0

def of_two(sample, other):
    return 1.0

def of_one(sample, scale=2.0):
    return scale
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "their_rewards.py").write_text(PLUG_IN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "their_rewards", raising=False)
    return tmp_path / "their_rewards.py"


def error_of(function, *args) -> BaseException:
    with pytest.raises(Exception) as caught:
        function(*args)
    return caught.value


def test_the_place_is_the_users_last_line(module):
    reward = plugins.load("--reward", "their_rewards:reward", {})
    (reason,) = Verifier("r", reward).outcomes([Sample("q", "{")])
    assert f" ({module}:5); the response was '{{'" in reason
    own = RuntimeError()  # megarl's error, which the user's caused
    own.__cause__ = error_of(guard.call, reward, Sample("q", "{"), 60.0)
    assert plugins.place_of(own) == f" ({module}:5)"


def test_a_traceback_begins_with_the_users_code(module, monkeypatch):
    error = error_of(guard.call, plugins.load("--reward", "their_rewards:reward", {}), Sample("q", "{"), 60.0)
    shown = plugins.traceback_of(error)
    assert shown.startswith(f'Traceback of your code:\n  File "{module}", line 8, in reward\n')
    assert "megarl/rewards" not in shown and "JSONDecodeError" in shown and "MEGARL_TRACEBACK=full" in shown
    monkeypatch.setenv("MEGARL_TRACEBACK", "full")
    assert "megarl/rewards/guard.py" in plugins.traceback_of(error)


def test_a_traceback_has_no_frames_of_packages_and_none_of_an_error_that_names_its_places(module):
    error = error_of(plugins.load("--reward", "their_rewards:reward", {}), Sample("q", "{"))
    assert "raw_decode" in "".join(traceback.format_exception(error))
    error = error_of(guard.call, plugins.load("--reward", "their_rewards:reward", {}), Sample("q", "{"), 60.0)
    assert plugins.traceback_of(error).count('  File "') == 2
    assert plugins.traceback_of(TooManyFailures(f"reward r failed ({module}:5)")) == ""


def test_an_import_that_fails_names_the_line(tmp_path, monkeypatch):
    (tmp_path / "broken_rewards.py").write_text("import math\n\nLIMIT = math.missing\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match="cannot import broken_rewards: AttributeError: ") as caught:
        plugins.load("--reward", "broken_rewards:reward", {})
    assert str(caught.value).endswith(f" ({tmp_path}/broken_rewards.py:3)")


def test_an_error_of_megarl_has_no_place_and_its_whole_traceback():
    error = error_of(Settings, 1, 2, 3, *[0] * 1000)
    assert plugins.place_of(error) == "" and "test_user_code.py" in plugins.traceback_of(error)


@pytest.mark.parametrize("name, said", [
    ("of_verl", "takes (data_source, solution_str, ground_truth, extra_info=None), the signature of a reward of verl;"),
    ("of_trl", "takes (completions, **kwargs), the signature of a reward of TRL;"),
    ("of_openrlhf", "the signature of a reward of OpenRLHF;"), ("of_two", "takes (sample, other); megarl calls it"),
])  # fmt: skip
def test_a_reward_with_another_signature_is_refused(name, said, module):
    with pytest.raises(UsageError) as caught:
        build_verifiers(Settings(reward=f"their_rewards:{name}"))
    assert str(caught.value).startswith(f"--reward their_rewards:{name}: ") and said in str(caught.value)


def test_further_parameters_may_have_defaults(module):
    assert build_verifiers(Settings(reward="their_rewards:of_one")).names == ("their_rewards:of_one",)
