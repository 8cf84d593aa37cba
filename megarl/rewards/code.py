"""The verifier `code`: runs a response's Python code in the sandbox against the tests of its prompt."""

import re
import secrets
import time
from dataclasses import dataclass, replace
from typing import Any

from megarl.data.prompts import PromptSet
from megarl.errors import UsageError
from megarl.rewards import sandbox
from megarl.rewards.base import Sample, Score
from megarl.rewards.sandbox import Limits
from megarl.rewards.text import check_metadata

_FENCE = re.compile(r"^```(?:python3?|py)[ \t]*\r?\n(.*?)(?:^```|\Z)", re.MULTILINE | re.DOTALL | re.IGNORECASE)

# Program and asserts share one namespace, as in one file; code under `if __name__ == "__main__"` does not run. The
# program may exit with status 0 before the asserts run, so only a random mark printed after them proves that all
# passed. A program that inspects the interpreter can find the mark.
_ASSERTS = """
__name__ = "program"
__import__("sys").modules["program"] = __import__("sys").modules["__main__"]
exec(compile({program!r}, "program.py", "exec"))
exec(compile({asserts!r}, "tests.py", "exec"))
__import__("os").write(1, b"{mark}")
"""


@dataclass(frozen=True)
class _Example:
    stdin: str
    stdout: str

    def passed(self, program: str, limits: Limits) -> bool:
        outcome = sandbox.run(program, self.stdin, limits)
        return outcome.status == "ok" and _lines(outcome.stdout) == _lines(self.stdout)


@dataclass(frozen=True)
class _Asserts:
    code: str

    def passed(self, program: str, limits: Limits) -> bool:
        mark = secrets.token_hex(16)
        outcome = sandbox.run(_ASSERTS.format(program=program, asserts=self.code, mark=mark), limits=limits)
        return outcome.status == "ok" and mark in outcome.stdout


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
        passed += test.passed(program, replace(limits, seconds=left))
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
        raise UsageError(f"--reward code: this machine allows no sandbox: {reason}; see docs/sandbox.md")


def _tests(metadata: dict[str, Any] | None) -> list[_Example | _Asserts]:
    metadata = metadata or {}
    examples, asserts = metadata.get("tests", []), metadata.get("test_code")
    if not isinstance(examples, list):
        raise ValueError("metadata: tests must be a list of objects with input and output")
    tests: list[_Example | _Asserts] = []
    for number, example in enumerate(examples, 1):
        texts = [example.get(key) for key in ("input", "output")] if isinstance(example, dict) else [None]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(f"metadata: test {number} must be an object whose input and output are strings")
        tests.append(_Example(*texts))
    if asserts is not None:
        if not isinstance(asserts, str) or not asserts.strip():
            raise ValueError("metadata: test_code must be a string of Python statements")
        tests.append(_Asserts(asserts))
    if not tests:
        raise ValueError("metadata must hold tests, a list of objects with input and output, or test_code")
    return tests


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]
