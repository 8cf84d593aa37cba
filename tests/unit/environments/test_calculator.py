"""The calculator: arithmetic against Python's, hostile expressions, answers, and the control with an offset."""

import math
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.environments import calculator as module
from megarl.environments.calculator import MAX_LENGTH, OFFSET, calculator, calculator_offset, evaluate
from megarl.environments.protocol import Task
from tests.helpers.envs.played_environments import calling, play, said, written

numbers = st.integers(0, 10**9).map(str) | st.floats(0, 1e6).map(lambda value: f"{value:.3f}")
expressions = st.recursive(
    numbers,
    lambda inner: st.builds("({} {} {})".format, inner, st.sampled_from("+ - * / // %".split()), inner)
    | inner.map("-{}".format),
    max_leaves=8,
)  # fmt: skip


@given(expressions)
def test_values_are_pythons(text):
    try:
        expected = eval(text, {"__builtins__": {}})
    except ZeroDivisionError:
        with pytest.raises(ValueError, match="division by zero"):
            evaluate(text)
        return
    if len(text) <= MAX_LENGTH and abs(expected) < 1e50:
        assert evaluate(text) == expected and type(evaluate(text)) is type(expected)


@pytest.mark.parametrize(
    ("text", "shown"),
    [("123*456", "56088"), ("7/2", "3.5"), ("6/2", "3"), ("2**100", str(2**100)), (" -(3) ", "-3"), ("1e3", "1000"),
     ("0.1+0.2", repr(0.1 + 0.2)), ("2**-1", "0.5"), ("2**0.5", repr(math.sqrt(2))), ("-7//2", "-4")],
)  # fmt: skip
def test_results_as_text(text, shown):
    assert module.calculate(text) == shown


@pytest.mark.parametrize(
    "text",
    ["", "()", "1+", "a", "__import__('os')", "(1).real", "1 if 1 else 2", "1,2", "[1]", "1j", "'1'", "True", "1 2",
     "9**9**9**9", "10**61", "1e61", "9e999", "2**(10**50)", "(" * 99 + ")" * 99, "(" * 5000, "1" * 5000,
     "1/0", "1%0", "0**-1", "(-8)**0.5", "0.5**-9999", "1.5**5000", "1\0", "１+１", "\ud800", "1;2", "-" * 190 + "e"],
)  # fmt: skip
def test_all_else_is_a_value_error_and_a_line_without_paths(text):
    """The policy reads the message; Python's parser must not warn on the console either."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ValueError) as caught:
            evaluate(text)
    message = str(caught.value)
    assert message and "\n" not in message and ".py" not in message and len(message) < 200


@given(st.text("0123456789.eE+-*/%() ", max_size=40))
def test_any_text_of_these_characters_is_a_number_or_a_value_error(text):
    try:
        value = evaluate(text)
    except ValueError:
        return
    assert math.isfinite(value) and module.number_text(value)


def answered(environment, *turns, answer="56088"):
    return play(environment, Task([], answer=answer), list(turns))[1]


def test_the_tool_is_called_and_the_answer_compared():
    observations = answered(calculator(), calling(0, "calculate", expression="123*456"), *written("it is 56,088."))
    assert said(observations)[0] == "56088" and observations[0].messages[0]["role"] == "tool"
    assert [(o.reward, o.done) for o in observations] == [(0.0, False), (1.0, True)]


@pytest.mark.parametrize(
    ("text", "reward"),
    [("56088", 1), ("123 * 456 = 56088", 1), ("56088 = 123*456", 0), ("560880", 0), ("-56088", 0), ("56088.5", 0),
     ("5 6088", 0), ("", 0), ("none", 0), ("٥٦٠٨٨", 0), (f"{56088 + OFFSET}", 0), ("56,088", 1), ("9" * 9999, 0)],
)  # fmt: skip
def test_the_last_number_is_the_answer(text, reward):
    assert answered(calculator(), *written(text))[0].reward == reward


def test_a_policy_that_uses_the_tool_carries_its_offset():
    observations = answered(calculator_offset(), calling(0, "calculate", expression="123*456"))
    assert said(observations) == [str(56088 + OFFSET)]
    assert answered(calculator_offset(), *written(f"{56088 + OFFSET}"))[0].reward == 1
    assert answered(calculator_offset(), *written("56088"))[0].reward == 0
    assert calculator_offset().tools == calculator().tools, "the policy must not see which one it has"


@pytest.mark.parametrize("answer", [None, "", "x", "1.5"])
def test_a_task_without_a_whole_number_as_its_answer_is_refused(answer):
    with pytest.raises(ValueError, match="must be a whole number"):
        answered(calculator(), *written("1"), answer=answer)
