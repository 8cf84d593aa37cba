"""The calculator: arithmetic against Python's, hostile expressions, answers, and the control with an offset. Games, and
the tool that runs programs."""

import math
import random
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.confine import sandbox
from megarl.confine.sandbox import Limits, Outcome
from megarl.environments import built_in
from megarl.environments.built_in import (
    MAX_LENGTH,
    MAX_OUTPUT,
    OFFSET,
    GuessNumber,
    calculator,
    calculator_offset,
    evaluate,
    guess_number_blind,
    outcome_text,
    program_runner,
)
from megarl.environments.protocol import Task
from megarl.errors import UsageError
from tests.helpers.envs.played_environments import calling, check_replay, play, said, written

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
    assert built_in.calculate(text) == shown


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
    assert math.isfinite(value) and built_in.number_text(value)


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


def secret(task):
    """The number of a task, found by asking for each."""
    low, high = task.metadata.get("low", 1), task.metadata.get("high", 15)
    game, found = GuessNumber(), []
    for number, turn in enumerate(written(*map(str, range(low, high + 1))), start=low):
        game.reset(task)
        found += [number] if game.step(turn).reward == 1.0 else []
    (number,) = found
    return number


def bisect(environment, task, trusting=True):
    """The rewards of a policy that halves the range by the answers; without trust it guesses 1, 2, 3, ..."""
    low, high = task.metadata.get("low", 1), task.metadata.get("high", 15)
    environment.reset(task)
    rewards = []
    for number in range(20):
        guess = (low + high) // 2 if trusting else number + 1
        observation = environment.step(written(str(guess))[0])
        rewards.append(observation.reward)
        if observation.done:
            return rewards
        low, high = (guess + 1, high) if said([observation]) == ["higher"] else (low, guess - 1)
    raise AssertionError("the episode does not end")


def test_answers_rewards_and_end():
    task = Task([], seed=3)
    number = secret(task)
    assert 1 < number < 15
    below, above = str(number - 1), f"is it {number + 1}? or {number}"
    first, observations = play(GuessNumber(), task, written(below, above, above, str(number), "never read"))
    assert first.messages == [] and said(observations) == ["higher", "lower", "lower", ""]
    assert [(o.reward, o.done, o.correct) for o in observations] == [(0.0, False, False)] * 3 + [(1.0, True, True)]
    _, observations = play(GuessNumber(), task, written(*[below] * 9))
    assert len(observations) == 4 and (observations[-1].reward, observations[-1].correct) == (0.0, False)


def test_each_number_is_drawn_and_halving_finds_it_in_four_turns():
    tasks = [Task([], seed=seed) for seed in range(100)]
    assert {secret(task) for task in tasks} == set(range(1, 16))
    assert all(sum(bisect(GuessNumber(), task)) == 1.0 for task in tasks)


def test_without_answers_no_policy_finds_more_than_four_of_fifteen():
    """Constant answers: what a policy sees depends on the number only by the episode's end."""
    tasks = {}
    for seed in range(100):
        tasks.setdefault(secret(Task([], seed=seed)), Task([], seed=seed))
    for trusting in (True, False):
        solved = sum(sum(bisect(guess_number_blind(), task, trusting)) for task in tasks.values())
        assert len(tasks) == 15 and solved <= 4
    answers = set()
    for number, task in tasks.items():
        for turn in written(*(str(guess) for guess in range(1, 16) if guess != number)):
            game = guess_number_blind()
            game.reset(task)
            answers.update(said([game.step(turn)]))
    assert answers == {"wrong"}


def test_range_and_guesses_of_the_metadata():
    task = Task([], metadata={"low": 100, "high": 131, "guesses": 5}, seed=7)
    assert 100 <= secret(task) <= 131
    rewards = bisect(GuessNumber(), task)
    assert len(rewards) <= 5
    wrong = "100" if secret(task) > 100 else "131"
    assert len(play(GuessNumber(), task, written(*[wrong] * 6))[1]) == 5


@pytest.mark.parametrize("text", ["", "-", "9" * 5000, "９", "\ud800", "1" * 19, "½", "\0", "0", "16", "108"])
@pytest.mark.parametrize("make", [GuessNumber, guess_number_blind])
def test_what_is_no_number_of_the_range_ends_the_episode(text, make):
    task = Task([], seed=1)
    (observation,) = play(make(), task, written(text, str(secret(task))))[1]
    assert (observation.messages, observation.reward, observation.done) == ([], 0.0, True)


@pytest.mark.parametrize("metadata", [{"low": 5, "high": 4}, {"guesses": 0}, {"low": "1"}, {"high": True}, {"low": -1}])
def test_wrong_metadata(metadata):
    with pytest.raises(ValueError, match="metadata: "):
        GuessNumber().reset(Task([], metadata=metadata))


def test_restored_at_each_turn_and_no_global_generator_is_touched():
    random.seed(11)
    state = random.getstate()
    for make in (GuessNumber, guess_number_blind):
        check_replay(make, Task([], seed=2**63 - 5), written("0", "x", "16", "0"))
    assert random.getstate() == state


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
    monkeypatch.setattr(built_in, "LIMITS", EASY)
    environment = built_in.python_tool()
    assert environment.tools[0]["function"]["name"] == "python"
    turns = [calling(0, "python", code="print(2**10)"), *written("1024")]
    _, observations = play(environment, Task([], answer="1024"), turns)
    assert said(observations) == ["1024", ""] and observations[-1].done


def test_a_machine_without_a_sandbox_is_refused(monkeypatch):
    monkeypatch.setattr(sandbox, "available", lambda: "unshare: Operation not permitted")
    with pytest.raises(UsageError, match="the tool python: this machine allows no sandbox: unshare"):
        built_in.python_tool()
