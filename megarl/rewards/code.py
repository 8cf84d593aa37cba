"""The verifier `code`: runs a response's Python code in the sandbox against the tests of its prompt."""

import ast
import builtins
import functools
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megarl.confine import sandbox
from megarl.confine.sandbox import Limits
from megarl.data.prompts import PromptSet
from megarl.errors import UsageError
from megarl.rewards.base import BuiltIn, Sample, Score
from megarl.rewards.text import check_metadata

_FENCE = re.compile(r"^```(?:python3?|py)[ \t]*\r?\n(.*?)(?:^```|\Z)", re.MULTILINE | re.DOTALL | re.IGNORECASE)

# Runs in the sandbox. Asserts run in the program's namespace, as in one file; code under `if __name__ == "__main__"`
# does not run. What the program assigns is no part of the harness: the tests are compiled first, and Python's built-ins
# and the modules that the tests import are as before the program. It may exit with status 0 before the asserts run, so
# only a random mark printed after them proves that all passed. A program that inspects the interpreter can find it.
_HARNESS = """
def check():
    import builtins, os, sys
    program = compile({program!r}, "program.py", "exec", dont_inherit=True)
    tests = compile({tests!r}, "tests.py", "exec", dont_inherit=True)
    for name in {imports!r}:
        try:
            __import__(name)
        except ImportError:
            pass
    modules = {{name: sys.modules[name] for name in {imports!r} if name in sys.modules}}
    before = [(vars(module), dict(vars(module))) for module in (builtins, os, sys, *modules.values())]
    execute, write, settrace, setprofile = exec, os.write, sys.settrace, sys.setprofile
    module = type(sys)("program")
    loaded, names = sys.modules, vars(module)
    loaded["program"] = module
    execute(program, names)
    settrace(None)
    setprofile(None)
    for now, then in before:
        now.update(then)
    loaded.update(modules)
    loaded["program"] = module
    names["__builtins__"] = builtins
    for private, name in {builtins!r}:
        names[private] = builtins.__dict__[name]
    execute(tests, names)
    write(1, b"{mark}")
check()
"""


Test = Callable[[str, Limits], bool]  # whether a program passes it


def _example(stdin: str, stdout: str) -> Test:
    def passed(program: str, limits: Limits) -> bool:
        outcome = sandbox.run(program, stdin, limits)
        return outcome.status == "ok" and _lines(outcome.stdout) == _lines(stdout)

    return passed


def _asserts(code: str) -> Test:
    def passed(program: str, limits: Limits) -> bool:
        mark = secrets.token_hex(16)
        tests, private = with_own_builtins(code, f"_{secrets.token_hex(8)}_")
        imports = sorted(_imported(ast.parse(code)) - {"program"})
        script = _HARNESS.format(program=program, tests=tests, imports=imports, builtins=private, mark=mark)
        outcome = sandbox.run(script, limits=limits)
        return outcome.status == "ok" and mark in outcome.stdout

    return passed


def with_own_builtins(tests: str, prefix: str) -> tuple[str, list[tuple[str, str]]]:
    """The tests with Python's built-ins under private names, which a program cannot have defined; (private, built-in).
    Built-ins that the tests define themselves keep their names. So do all if the tests use no other name: then it is
    the program's function that is called like a built-in, as in `assert sum(10, 15) == 6`.
    """
    tree = ast.parse(tests)
    used = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    bound = {node.id for node in used if not isinstance(node.ctx, ast.Load)}
    for node in ast.walk(tree):
        if isinstance(node, ast.alias):
            bound.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            bound.add(node.name)
    free = {node.id for node in used} - bound
    python = {name for name in free if hasattr(builtins, name) and not name.startswith("__")}
    if free == python and "program" not in _imported(tree):
        return tests, []
    for node in used:
        if node.id in python:
            node.id = prefix + node.id
    return ast.unparse(tree), [(prefix + name, name) for name in sorted(python)]


def _imported(tree: ast.AST) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def check(sample: Sample, limits: Limits = Limits()) -> Score:
    """The fraction of its prompt's tests that the response's program passes; correct: all of them.

    The tests are in the metadata: `tests`, a list of {"input": standard input, "output": expected standard output},
    compared without trailing white space of lines and text; or `test_code`, one test: statements that raise if the
    program is wrong; or both. A program that fails or exceeds a limit does not pass the test. All tests together get
    `limits.seconds`; tests not run by then count as failed. Raises ValueError for a sample without tests, SandboxError
    if this machine allows no sandbox.
    """
    tests = _tests(sample.metadata)
    if not sample.finished:
        return Score(0.0, False, {"code": 0.0})
    program = program_of(sample.response)
    deadline = time.monotonic() + limits.seconds
    passed = 0
    for test in tests:
        left = deadline - time.monotonic()
        if left <= 0:
            break
        passed += test(program, replace(limits, seconds=left))
    return Score(passed / len(tests), passed == len(tests), {"code": passed / len(tests)})


def program_of(response: str) -> str:
    """The last block fenced with ```python (or py, python3), even if unclosed; else the whole response."""
    blocks = _FENCE.findall(response)
    return blocks[-1] if blocks else response


def check_code(prompts: PromptSet):
    """UsageError for the first line whose metadata holds no tests or malformed ones."""
    check_metadata("code", prompts, _tests)


def load_code(prompts: PromptSet):
    """UsageError if this machine, which will score, cannot run the sandbox."""
    reason = sandbox.available()
    if reason:
        raise UsageError(f"--reward code: this machine allows no sandbox: {reason}; see docs/rewards.md")


def _tests(metadata: dict[str, Any] | None) -> list[Test]:
    metadata = metadata or {}
    examples, asserts = metadata.get("tests", []), metadata.get("test_code")
    if not isinstance(examples, list):
        raise ValueError("metadata: tests must be a list of objects with input and output")
    tests: list[Test] = []
    for number, example in enumerate(examples, 1):
        given, expected = (example.get(key) if isinstance(example, dict) else None for key in ("input", "output"))
        if not isinstance(given, str) or not isinstance(expected, str):
            raise ValueError(f"metadata: test {number} must be an object whose input and output are strings")
        tests.append(_example(given, expected))
    if asserts is not None:
        if not isinstance(asserts, str) or not asserts.strip():
            raise ValueError("metadata: test_code must be a string of Python statements")
        try:
            compile(asserts, "test_code", "exec", dont_inherit=True)
        except (SyntaxError, ValueError) as error:
            raise ValueError(f"metadata: test_code is no Python: {error}") from None
        tests.append(_asserts(asserts))
    if not tests:
        raise ValueError("metadata must hold tests, a list of objects with input and output, or test_code")
    return tests


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


CODE = BuiltIn(
    lambda options: functools.partial(check, limits=Limits(options.timeout, options.memory_mb)),
    check_code,
    lambda prompts, _: load_code(prompts),
    limited=False,
    threads="workers",  # each program runs in its own process; a thread waits for it
)
