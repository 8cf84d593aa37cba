"""The exception for wrong input, an argument parser that raises it, and warnings."""

import argparse
import sys
import typing
from collections.abc import Iterable

WARNED = "MEGARL_WARNED"  # environment variable: set if a launcher has printed the warnings already


STOPPED = 3  # exit status of a run that one of its own limits ended; no launcher of megarl starts it again


class UsageError(Exception):
    """Wrong input that the user can fix: one line that names the flag, its value, and what is allowed.

    Programs print the line and exit with status 2 before any work starts. `speaker` is the world rank that prints it:
    rank 0, unless only the ranks of another role can detect the error.
    """

    def __init__(self, message: str, speaker: int = 0):
        super().__init__(message)
        self.speaker = speaker


class RunStopped(Exception):
    """A limit that the user has set ends the run. Programs print it in one line and exit with status `STOPPED`."""


class ArgumentParser(argparse.ArgumentParser):
    """An argparse parser that raises UsageError instead of exiting."""

    def error(self, message: str) -> typing.NoReturn:
        raise UsageError(message)


def warn(warnings: Iterable[str]):
    """Prints each warning on one line of stderr."""
    for text in warnings:
        print(f"megarl: warning: {text}", file=sys.stderr, flush=True)
