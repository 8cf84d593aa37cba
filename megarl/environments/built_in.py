"""The built-in environments.

* `calculator`, a tool that computes within limits of length, depth and size of numbers; nothing is run. Its control
  `calculator-offset`, whose results are wrong; and `calculator-agent`, the same environment as an agent that owns the
  loop, which gives the same bytes.
* The game `guess-number`, and `guess-number-blind`, its control.
* `python-tool`, which runs the policy's Python programs in the sandbox (docs/rewards.md).
"""

import ast
import itertools
import json
import math
import operator
import random
import re
from collections.abc import Callable
from typing import Any

from megarl.confine import sandbox
from megarl.confine.sandbox import Limits, Outcome
from megarl.environments.protocol import BaseEnvironment, Observation, Task, ToolCall, Turn, user_message
from megarl.environments.tools import ToolEnvironment
from megarl.errors import UsageError

MAX_LENGTH = 200  # characters of an expression
_MAX_VALUE = 10**60
_CHARACTERS = re.compile(r"[0-9.eE+\-*/%()\s]*")  # of others Python's parser might warn
_OPERATORS: dict[type, Callable] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
OFFSET = 1009  # what the results of `calculator-offset` are too large by
_NUMBER = re.compile(r"-?[0-9][0-9,]*(?:\.[0-9]+)?")  # with or without commas between thousands


def calculate(expression: str) -> str:
    """Computes an arithmetic expression.

    Args:
        expression: numbers, parentheses and + - * / // % **
    """
    return number_text(evaluate(expression))


def calculator() -> ToolEnvironment:
    """`calculator`: the reward is 1 if the last number of the final turn is the task's answer."""
    return ToolEnvironment([calculate], reward=lambda task, text: _right(task, text, 0))


def calculator_offset() -> ToolEnvironment:
    """`calculator-offset`: results are `OFFSET` too large, and so must the final answer be.

    A policy that uses the tool carries the offset into its answers; one that computes by itself does not.
    """
    return ToolEnvironment([_with_offset(calculate)], reward=lambda task, text: _right(task, text, OFFSET))


def _with_offset(tool: Callable[[str], str]) -> Callable[[str], str]:
    def shifted(expression: str) -> str:
        return number_text(evaluate(expression) + OFFSET)

    shifted.__name__, shifted.__doc__ = tool.__name__, tool.__doc__
    return shifted


def _right(task: Task, text: str, offset: int) -> float:
    """1 if the last number of a text is the task's answer plus `offset`; ValueError for a task without a number."""
    try:
        expected = str(int(task.answer or "") + offset)
    except ValueError:
        raise ValueError(f"calculator: the task's answer must be a whole number, not {task.answer!r}") from None
    numbers = [number.replace(",", "") for number in _NUMBER.findall(text)]
    return float(bool(numbers) and numbers[-1] == expected)


def evaluate(expression: str) -> int | float:
    """The value of an expression of numbers, parentheses, signs and `+ - * / // % **`.

    ValueError, for the policy: it is none, is too long, divides by zero, or a number in it is above 10**60.
    """
    if len(expression) > MAX_LENGTH:
        raise ValueError(f"the expression has more than {MAX_LENGTH} characters")
    try:
        if not _CHARACTERS.fullmatch(expression):
            raise SyntaxError
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError("not an arithmetic expression of numbers and + - * / // % **") from None
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    except OverflowError:
        raise ValueError("a number is too large") from None


def number_text(value: int | float) -> str:
    """A number as people write it: no `.0` on whole ones."""
    return str(int(value)) if value == int(value) else repr(value)


def _value(node: ast.expr) -> int | float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return _bounded(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd | ast.USub):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow):
            return _power(left, right)
        if type(node.op) in _OPERATORS:
            return _bounded(_OPERATORS[type(node.op)](left, right))
    raise ValueError("not an arithmetic expression of numbers and + - * / // % **")


def _power(base: int | float, exponent: int | float) -> int | float:
    # Checked before, because the power itself could fill the memory.
    if abs(base) > 1 and abs(exponent) * math.log10(abs(base)) > math.log10(_MAX_VALUE):
        raise OverflowError
    value = base**exponent
    if isinstance(value, complex):
        raise ValueError("a root of a negative number")
    return _bounded(value)


def _bounded(value: int | float) -> int | float:
    if not abs(value) <= _MAX_VALUE:
        raise OverflowError
    return value


# -- the agent ---------------------------------------------------------------------------------------------------------


async def calculator_agent(task: Task, client: Any) -> float:
    """Calls what the policy asks for until it calls nothing; 1 if the last number of the last turn is the answer."""
    tools, messages = calculator(), list(task.messages)
    tools.reset(task)
    for number in itertools.count():
        answer = await client.chat.completions.create(model="policy", messages=messages, tools=tools.tools)
        choice = answer.choices[0]
        if choice.finish_reason == "length":
            return 0.0
        seen = await tools.step(_turn_of(number, choice.message))
        if seen.done:
            return seen.reward
        # OpenAI's schema wants an id of each result, also of calls that could not be read.
        messages.append(choice.message)
        messages += [{"tool_call_id": "unread", **each} if each["role"] == "tool" else each for each in seen.messages]
    raise AssertionError  # the loop has no end of its own


def _turn_of(number: int, message: Any) -> Turn:
    written = [(call.id, call.function) for call in message.tool_calls or ()]
    calls = tuple(ToolCall(name, function.name, json.loads(function.arguments)) for name, function in written)
    errors = tuple(getattr(message, "tool_call_errors", None) or ())
    return Turn(number, message.content or "", content=message.content or "", calls=calls, errors=errors)


# -- games -------------------------------------------------------------------------------------------------------------


_INTEGER = re.compile(r"[0-9]+")
_MAX_DIGITS = 18  # of a guess that is read as a number


class GuessNumber(BaseEnvironment):
    """The policy guesses a number, which the task's seed draws, and is told whether it is higher or lower.

    The metadata may give `low` and `high`, the range (1 to 15), and `guesses`, the turns (4). The first integer of a
    turn is its guess. The reward is 1 for the right guess, which ends the episode, as the last guess does; so does a
    turn without a number of the range: a policy could gain entropy by guesses that cost little. With `blind` every
    answer is the same, so no policy finds one of n numbers in g guesses more often than g times in n.
    """

    def __init__(self, blind: bool = False):
        self._blind = blind
        self._range, self._secret, self._left = range(0), 0, 0

    def reset(self, task: Task) -> Observation:
        """Draws the number. ValueError if the metadata are not a range and a number of guesses."""
        low, high = _number(task.metadata, "low", 1), _number(task.metadata, "high", 15)
        guesses = _number(task.metadata, "guesses", 4)
        if low > high or guesses < 1:
            raise ValueError(f"metadata: low {low}, high {high}, guesses {guesses}: no range or no guess")
        self._range, self._left = range(low, high + 1), guesses
        self._secret = random.Random(task.seed).randint(low, high)
        return Observation()

    def step(self, turn: Turn) -> Observation:
        """Answers a guess."""
        number = _INTEGER.search(turn.content)
        guess = int(number[0]) if number and len(number[0]) <= _MAX_DIGITS else None
        self._left -= 1
        if guess == self._secret:
            return Observation(reward=1.0, done=True, correct=True)
        if guess not in self._range or self._left <= 0:
            return Observation(done=True, correct=False)
        answer = "wrong" if self._blind else "higher" if guess < self._secret else "lower"
        return Observation([user_message(answer)], correct=False)


def guess_number_blind() -> GuessNumber:
    """`guess-number-blind`: its answers say nothing."""
    return GuessNumber(blind=True)


def _number(metadata: dict[str, Any], name: str, default: int) -> int:
    value = metadata.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"metadata: {name} must be a whole number of at least 0, not {value!r}")
    return value


# -- Python programs as a tool -----------------------------------------------------------------------------------------


LIMITS = Limits(seconds=10.0, memory_mb=512, output_bytes=1 << 16)
MAX_OUTPUT = 4000  # characters of an answer
_ENDED = {"timeout": "the time limit", "memory": "the memory limit", "output": "the limit of output"}


def python_tool() -> ToolEnvironment:
    """An environment with the tool `python(code)`; the verifiers of `--reward` score the answer.

    A program sees nothing of earlier ones. What it does shortly before its limit, of wall-clock time, depends on the
    machine's load. UsageError on a machine that allows no sandbox.
    """
    reason = sandbox.available()
    if reason:
        raise UsageError(f"the tool python: this machine allows no sandbox: {reason}; see docs/rewards.md")
    # The tool's own limit ends a program; the environment's is only for a machine that is too slow to start one.
    return ToolEnvironment([program_runner(LIMITS)], timeout=LIMITS.seconds + 30.0)


def program_runner(limits: Limits) -> Callable[[str], str]:
    """The function `python` of the tool, with these limits for each program."""

    def python(code: str) -> str:
        """Runs a Python program and returns what it prints. Only the standard library; no network, no files kept.

        Args:
            code: the program
        """
        return outcome_text(sandbox.run(code, limits=limits))

    return python


def outcome_text(outcome: Outcome) -> str:
    """What a program printed, then its errors, then the limit that ended it; cut in the middle to `MAX_OUTPUT`."""
    texts = [outcome.stdout.rstrip(), outcome.stderr.rstrip()]
    if outcome.status in _ENDED:
        texts.append(f"Error: {_ENDED[outcome.status]} ended the program")
    elif outcome.status != "ok" and not outcome.stderr.strip():
        texts.append("Error: the program failed without a message")
    text = "\n".join(text for text in texts if text) or "(the program printed nothing)"
    if len(text) <= MAX_OUTPUT:
        return text
    half = MAX_OUTPUT // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters cut ...]\n{text[-half:]}"
