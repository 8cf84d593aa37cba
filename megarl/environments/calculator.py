"""The environment `calculator`, a tool that computes, and its control `calculator-offset`, whose results are wrong."""

import re
from collections.abc import Callable

from megarl.environments.arithmetic import evaluate, number_text
from megarl.environments.protocol import Task
from megarl.environments.tools import ToolEnvironment

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
