"""The exception for wrong input, rules that flags may break, a parser that raises it, names of flags, and warnings."""

import argparse
import contextlib
import functools
import os
import sys
import typing
from collections.abc import Callable, Iterable, Iterator

WARNED = "MEGARL_WARNED"  # environment variable: set if a launcher has printed the warnings already
CHECKS_FIRST = "MEGARL_CHECKS_FIRST"  # set while a launcher checks a command line with --check before it starts ranks
MAX_INTEGER = 2**63 - 1  # of a tensor
MAX_LINE = 2000  # characters of an error about a file
STOPPED = 3  # exit status of a run that one of its own limits ended; no launcher of megarl starts it again


class UsageError(Exception):
    """Wrong input that the user can fix: one line that names the flag, its value, and what is allowed.

    Programs print the line and exit with status 2 before any work starts. `reporting_rank` is the world rank that
    prints it: rank 0, unless only the ranks of another role can detect the error.
    """

    def __init__(self, message: str, reporting_rank: int = 0):
        super().__init__(message)
        self.reporting_rank = reporting_rank


class Rule(typing.NamedTuple):
    """A flag, whether it breaks a rule with the others, and the reason."""

    flag: str
    is_broken: object
    reason: str
    value: object = None  # shown in the error; None: the attribute with the flag's name

    def problem(self, settings: typing.Any) -> str:
        """The error of a broken rule: the flag with its value, and the reason. `settings`: flags as attributes."""
        value = getattr(settings, self.flag[2:].replace("-", "_")) if self.value is None else self.value
        return f"{self.flag} {value}: {self.reason}"


class RunStopped(Exception):
    """A limit that the user has set ends the run. Programs print it in one line and exit with status `STOPPED`."""


class TooManyFailures(RuntimeError):
    """Verifiers or environments failed more often than the user allows."""


class ArgumentParser(argparse.ArgumentParser):
    """An argparse parser that raises UsageError instead of exiting, and for values that argparse would let pass."""

    def parse_known_args(self, args=None, namespace=None):
        """As argparse's. UsageError also for a null character, a whole number too large for a tensor, and `--flag=--`,
        of which argparse makes an empty list."""
        for token in args or ():
            if "\0" in token:
                raise UsageError(f"{token!r}: allowed is text without null characters")
            if token.startswith("--") and token.endswith("=--"):
                raise UsageError(f"{token}: has no value")
        found, rest = super().parse_known_args(args, namespace)
        for action in self._actions:
            value = getattr(found, action.dest, None)
            if isinstance(value, int) and not -MAX_INTEGER <= value <= MAX_INTEGER:
                raise UsageError(f"{action.option_strings[0]} {value}: allowed are numbers up to {MAX_INTEGER}")
        return found, rest

    def error(self, message: str) -> typing.NoReturn:
        raise UsageError(message)


def refuses_in_one_line(tool: str) -> Callable[[Callable[[list[str]], int]], Callable[[list[str]], int]]:
    """Decorator of a tool's main function: wrong input is one line on stderr and exit status 2."""

    def decorate(main: Callable[[list[str]], int]) -> Callable[[list[str]], int]:
        @functools.wraps(main)
        def run(argv: list[str]) -> int:
            try:
                return main(argv)
            except UsageError as error:
                print(f"{tool}: {' '.join(str(error).split())}", file=sys.stderr)
                return 2

        return run

    return decorate


@contextlib.contextmanager
def writing(place: str) -> Iterator[None]:
    """Body that writes files; UsageError if it cannot. `place`: where, such as a flag with its value."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{place}: cannot be written: {error.strerror}") from None


def flag_of(name: str) -> str:
    """`--kl-target` of the setting `kl_target`."""
    return "--" + name.replace("_", "-")


def one_line(text: str) -> str:
    """A text with names from files in it, fit for an error: control characters escaped, of bounded length."""
    shown = text if len(text) <= MAX_LINE else text[: MAX_LINE - 1] + "…"
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in shown)


def warn(warnings: Iterable[str]):
    """Prints each warning on one line of stderr."""
    for text in warnings:
        print(f"megarl: warning: {one_line(text)}", file=sys.stderr, flush=True)


def warn_as_first(warnings: Iterable[str]):
    """`warn` on rank 0, unless a launcher has done it, of what all ranks find before they are connected."""
    if os.environ.get("RANK", "0") == "0" and not os.environ.get(WARNED):
        warn(warnings)
