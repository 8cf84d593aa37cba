"""Names and values that become metrics: one rule, whoever gives them."""

import json

import numpy
import pytest
import torch

from megarl.confine import warm_process
from megarl.environments.agents.agent import observation_of
from megarl.environments.journal import _entry_of
from megarl.environments.protocol import Observation, checked
from megarl.environments.session_front import Registry, _parts
from megarl.measurements import MAX_NAME, MAX_PARTS, MAX_VALUE, is_metric, is_name, parts_of, value_of
from megarl.rewards.base import Sample, Score, Verifier, grouped
from megarl.rewards.isolated import Scorer
from megarl.rewards.remote import _score
from megarl.rollout.episodes.results import observations_of
from megarl.serving.error_answers import RequestError

# Names of subjects and metrics in published benchmarks and tools.
NAMES = [
    "tests", "Counting & Probability", "high_school_government_and_politics", "pass@4", "word-sorting", "C++",
    "math/algebra", "数学", "गणित", "Q&A (open)", "f1,macro", "50%", "v1.0", ".hidden", "a" * MAX_NAME,
]  # fmt: skip
WRONG = [
    "", " ", "a\nb", "a\r", "a\tb", "\x1b[2J", "../a", "a/../b", "..", ".", "a/./b", "/etc/passwd", "a/", "a//b",
    "a\\b", "\0", "\u202ea", "a\u200bb", "a\ud800", "a\xa0b", " a", "a / b", "\ufeffa", "a" * (MAX_NAME + 1), "\u2028",
]  # fmt: skip
WRONG_VALUES = [1e10, -1e10, 1e300, 10**400, 10**5000, float("nan"), float("inf")]


@pytest.mark.parametrize("name", NAMES)
def test_published_names_are_names(name):
    assert is_name(name) and is_metric(f"environment/reward/{name}")


@pytest.mark.parametrize("name", [*WRONG, None, 3, b"a"], ids=ascii)
def test_what_is_no_name(name):
    assert not is_name(name)


def test_numbers_of_libraries_are_plain():
    found = parts_of({"a": numpy.float32(0.5), "b": torch.tensor(2), "c": True, "d": -MAX_VALUE})
    assert found == {"a": 0.5, "b": 2.0, "c": 1.0, "d": -MAX_VALUE} and {*map(type, found.values())} == {float}
    with pytest.raises(ValueError, match="x is '1', not a finite number"):
        value_of("x", "1")


def of_reward(score: Score) -> str:
    """What a verifier with this result says; "" if it is taken."""
    (outcome,) = Verifier("mine", grouped(lambda samples: [score])).outcomes([Sample("q", "a")])
    return outcome if isinstance(outcome, str) else ""


def said(call) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    except RequestError as error:
        return str(error)
    return ""


def as_json(parts, value) -> dict:
    return json.loads(json.dumps({"reward": value, "parts": parts}))


def of_child(fields: dict) -> str:
    line = json.dumps({"score": {"correct": False, "extracted": None, **fields}}).encode()
    return warm_process.result_of(line, 1.0, "its result is none", Scorer).get("problem", "")


def of_journal(fields: dict) -> str:
    record = {"place": "a", "step": 1, "tools": [], "observation": fields}
    return "" if _entry_of(json.dumps(record).encode()) else "left out"


def of_remote(fields: dict) -> str:
    return of_reward(_score(json.dumps({"scores": [fields]}).encode()))


# Who gives names and values: functions of (parts, reward) that say what is wrong.
PRODUCERS = {
    "a reward": lambda parts, value: of_reward(Score(value, False, parts)),
    "an environment": lambda parts, value: said(lambda: checked(Observation(reward=value, parts=parts), "mine")),
    "an agent": lambda parts, value: said(
        lambda: checked(observation_of(Score(value, False, parts)), "mine")
    ),
    "a server": lambda parts, value: of_remote({"reward": value, "parts": parts}),
    "a child in the hands of a response": lambda parts, value: of_child({"reward": value, "parts": parts}),
    "a journal": lambda parts, value: of_journal({"reward": value, "parts": parts}),
    "a saved rollout": lambda parts, value: said(
        lambda: observations_of({"observations": [{"reward": value, "parts": parts}]})
    ),
}  # fmt: skip


@pytest.fixture
def registry(tmp_path):
    return Registry(1.0, None, lambda: 0.0)


@pytest.mark.parametrize("producer", PRODUCERS)
def test_each_producer_is_held_to_the_rule(producer):
    problem = PRODUCERS[producer]
    assert problem(dict.fromkeys(NAMES, 0.0), 0.0) == ""
    for name in WRONG:
        found = problem({name: 0.5}, 0.5)
        assert found and found.isprintable(), name
    for value in WRONG_VALUES[:4]:
        assert problem({}, value) and problem({"a": value, "b": -value}, 0.0), value
    assert problem({f"n{i}": 0.0 for i in range(MAX_PARTS)}, 0.0) == ""
    assert problem({f"n{i}": 0.0 for i in range(MAX_PARTS + 1)}, 0.0)


@pytest.mark.parametrize(
    "value", WRONG_VALUES, ids=lambda value: f"{value:.10}" if isinstance(value, float) else "whole"
)
def test_a_wrong_value_is_said_in_a_line(value):
    found = of_reward(Score(value, False))
    assert found.startswith("reward mine on prompt 'q': reward is ") and len(found) < 200
    assert "not a finite number" in found or "; allowed is -1e+09 to 1e+09" in found


def test_a_failure_names_the_environment_and_what_is_allowed():
    found = said(lambda: checked(Observation(parts={"a\nb": 1.0}), "my_module:Game"))
    assert found == (
        r"my_module:Game: parts has the name 'a\nb'; allowed are 1 to 100 printable characters without \, with a name "
        "before and after each /"
    )


def test_drivers_cannot_make_columns_without_end(registry):
    for session in range(8):
        parts = {f"s{session}_{i}": 1.0 for i in range(8)}
        assert _parts(parts, registry) == parts
    assert said(lambda: _parts({"new": 1.0}, registry)) == "the run has 64 names of parts already; one more is 'new'"
    assert said(lambda: _parts({"s0_0": 1.0, "new": 1.0}, registry))
    assert _parts({"s0_0": 0.5, "s7_7": 1.0}, registry) == {"s0_0": 0.5, "s7_7": 1.0}
