"""The environment `python-tool`: a tool that runs the policy's Python programs in the sandbox (docs/rewards.md)."""

from collections.abc import Callable

from megarl.confine import sandbox
from megarl.confine.sandbox import Limits, Outcome
from megarl.environments.tools import ToolEnvironment
from megarl.errors import UsageError

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
