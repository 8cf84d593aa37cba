"""The one exception for input that a user can mend, the parser that raises it, and warnings."""

import argparse
import sys
import typing
from collections.abc import Iterable

WARNED = "MEGARL_WARNED"  # environment variable that a launcher sets once it has printed the warnings of its ranks


class UsageError(Exception):
    """Wrong input: one line that names what is wrong, the value, and what is allowed.

    Programs print the line and leave with exit status 2, before any work starts. `speaker` is the world rank that
    prints it: rank 0, unless only ranks of another role can know.
    """

    def __init__(self, message: str, speaker: int = 0):
        super().__init__(message)
        self.speaker = speaker


class ArgumentParser(argparse.ArgumentParser):
    """argparse's, which says what is wrong by a UsageError instead of leaving the process."""

    def error(self, message: str) -> typing.NoReturn:
        raise UsageError(message)


def warn(warnings: Iterable[str]):
    """Prints each warning as a line on stderr."""
    for text in warnings:
        print(f"megarl: warning: {text}", file=sys.stderr, flush=True)
