"""The one exception for input that a user can mend, and the parser that raises it."""

import argparse
import typing


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
