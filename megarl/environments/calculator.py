"""The environment `calculator`, a tool that computes; its control `calculator-offset`, whose results are wrong; and
`calculator-agent`, the same environment as an agent that owns the loop, which gives the same bytes.

What the policy wrote is computed within limits of length, depth and size of numbers; nothing is run.
"""

import ast
import itertools
import json
import math
import operator
import re
from collections.abc import Callable
from typing import Any

from megarl.environments.protocol import Task, ToolCall, Turn
from megarl.environments.tools import ToolEnvironment

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
