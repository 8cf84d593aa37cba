"""Arithmetic of a text that the policy wrote, within limits of length, depth and size of numbers. Nothing is run."""

import ast
import math
import operator
import re
from collections.abc import Callable

MAX_LENGTH = 200  # characters of an expression
_MAX_VALUE = 10**60
_CHARACTERS = re.compile(r"[0-9.eE+\-*/%()\s]*")  # of others Python's parser might warn
_OPERATORS: dict[type, Callable] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip


def evaluate(expression: str) -> int | float:
    """The value of an expression of numbers, parentheses, signs and `+ - * / // % **`.

    Raises:
        ValueError: it is none, is too long, divides by zero, or a number in it is above 10**60. The message is for the
            policy.
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
