"""Keeps the scorers of reasoning_gym from running what a response says.

Several scorers pass the response to `eval` or to sympy's parser, which is an `eval`, too. Beside the expected answer,
such text could compute or copy it. Here `eval` becomes `ast.literal_eval` for the tasks whose answers may be Python
lists, and text for sympy must consist of numbers, known names and arithmetic.
"""

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Callable

# Tasks by what their scorer does with the response. A test checks that these are all in the installed version.
LITERALS = frozenset({"binary_matrix", "n_queens", "number_sorting", "spiral_matrix", "string_insertion"})
EXPRESSIONS = frozenset(
    {"countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"}
)
EVALUATORS = frozenset({"eval", "exec", "compile", "sympify", "parse_expr", "parse_latex", "__import__"})

_UNREADABLE = "?"  # for which each scorer of an expression gives the score of a text that it cannot parse
_MAX_LENGTH = 10_000
_FUNCTIONS = (
    "sin cos tan sec csc cot asin acos atan asec acsc acot sinh cosh tanh asinh acosh atanh exp log ln sqrt root Abs "
    "abs pi erf Ei Si Ci li oo"
)
_NUMBER = r"(?:\d{1,100}(?:\.\d{0,100})?|\.\d{1,100})(?:[eE][+-]?\d{1,2})?"
_TOKEN = re.compile(
    rf"\s+|{_NUMBER}(?![\w.])|(?:[A-Za-z]_?\d{{0,2}}|{'|'.join(_FUNCTIONS.split())})(?!\w)|\*\*|//|[-+*/%^(),!]"
)
# Exponents of four or more digits, powers as exponents, factorials of more than three digits or of expressions:
# numbers that fill the memory. Those that get through are ended by the limits.
_HUGE = re.compile(r"(?:\*\*|\^)[\s(+-]*(?:\d{4,}|[\d.]+[\s)]*(?:\*\*|!)|[^()]*\)\s*(?:\*\*|!))|\d{4,}\s*!|[!)]\s*!")


def harmless(task: str, answer: str, reference: str | None) -> str:
    """The answer, or for a task of expressions a text that its scorer cannot parse, if the answer is no expression.

    `Integral(f(x), x)` is none, which the scorers of integrals would accept: only where it is the reference answer.
    """
    return answer if task not in EXPRESSIONS or answer == reference or _is_expression(answer) else _UNREADABLE


def make_safe(task: str, scorer: Callable):
    """Replace `eval` for a task of literals; ValueError for one whose scorer evaluates text in an unknown way."""
    if task in LITERALS:
        vars(sys.modules[scorer.__module__])["eval"] = ast.literal_eval
    elif task not in EXPRESSIONS and evaluates(scorer):
        raise ValueError("its scorer evaluates text, and this version of megarl does not know how to make that safe")


def evaluates(function: Callable) -> bool:
    """Whether the source of a function has a call that evaluates text."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return any(getattr(call, "id", getattr(call, "attr", None)) in EVALUATORS for call in calls)


def _is_expression(text: str) -> bool:
    if len(text) > _MAX_LENGTH or _HUGE.search(text):
        return False
    end = 0
    while end < len(text):
        token = _TOKEN.match(text, end)
        if token is None:
            return False
        end = token.end()
    return True
