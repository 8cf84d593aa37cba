"""The last line of the output of a program that failed: the line that says why.

A rank prints the line, and writes it into the file that its launcher has named in TORCHELASTIC_ERROR_FILE, as torch's
`record` does. megarl's launchers print it again when all ranks have ended, so that nothing comes after it; torchrun
itself shows it as the root cause. Imports no torch before a program has failed.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from megarl.observe import status_file

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # torchrun's name
SAVE = "MEGARL_RUN_FOLDER"  # environment variable: --save of the training run that a launcher has checked


class Failure(NamedTuple):
    """A rank that ended before its launcher ended it. `content`: of its error file, None without one."""

    rank: int
    status: int  # exit status, or minus the signal
    content: dict | None

    @property
    def is_killed(self) -> bool:
        """Whether something else has ended it. Libraries abort a process when its peers are gone: no cause."""
        return self.status < 0 and -self.status != signal.SIGABRT

    @property
    def exit_status(self) -> int:
        """As a shell tells it: 128 + the signal."""
        return self.status if self.status >= 0 else 128 - self.status

    @property
    def line(self) -> str | None:
        """What the rank has noted; None if that is nothing, or not of `note`."""
        message = (self.content or {}).get("message")
        line = message.get("message") if isinstance(message, dict) else None
        return line if isinstance(line, str) and line.startswith("megarl: ") else None

    @property
    def seconds(self) -> float:
        """When it noted that."""
        found = self._details().get("seconds")
        return found if isinstance(found, float) else 0.0

    @property
    def is_alone(self) -> bool:
        """Whether the rank has printed this line alone."""
        return self._details().get("alone") is True

    def _details(self) -> dict:
        message = (self.content or {}).get("message")
        details = message.get("extraInfo") if isinstance(message, dict) else None
        return details if isinstance(details, dict) else {}


def note(line: str | None, is_alone: bool = False) -> bool:
    """Tells the launcher why this rank fails; whether one reads it.

    Args:
        line: as the rank prints it; None: another rank has failed before.
        is_alone: the rank prints nothing else, and the other ranks are silent.
    """
    file, now = os.environ.get(ERROR_FILE), time.time()
    if not file:
        return False
    if line is None:
        line, now = "ended after another rank had failed", now + 1  # torchrun takes the first whole second as the cause
    details = {
        "py_callstack": line,
        "timestamp": str(int(now)),
        "seconds": now,
        "alone": is_alone,
    }  # torchrun reads the first two
    try:
        Path(file).write_text(json.dumps({"message": {"message": line, "extraInfo": details}}), encoding="utf-8")
    except OSError:
        return False
    return True


def read(rank: int, status: int, file: Path) -> Failure:
    """The failure of a rank with this error file."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        content = None
    return Failure(rank, status, content if isinstance(content, dict) else None)


def cause(failures: Sequence[Failure]) -> Failure | None:
    """The failure that the others follow from: a rank that was killed, else the first that has noted a line."""
    killed = [failure for failure in failures if failure.is_killed]
    noted = sorted((failure for failure in failures if failure.line), key=lambda failure: failure.seconds)
    return next(iter([*killed, *noted, *failures]), None)


def tell(failures: Sequence[Failure], resume: Callable[[str], str] = lambda folder: "", repeats: bool = True):
    """Prints the last line when all ranks have ended, and corrects a status.json that a killed run has left.

    Args:
        resume: for a folder of a run, the end of a line that says how to go on.
        repeats: also a line that its rank has printed alone: a launcher has printed more since.
    """
    found = cause(failures)
    if found is None:
        return
    line, folder = found.line, os.environ.get(SAVE)
    if found.status < 0 and (found.is_killed or not line):
        line = f"megarl: rank {found.rank} was ended by {_name(-found.status)}{resume(folder) if folder else ''}"
    if folder:
        status_file.end_killed(Path(folder), (line or "").removeprefix("megarl: ") or None)
    if line and (repeats or not (line == found.line and found.is_alone)):
        sys.stdout.flush()
        print(line, file=sys.stderr, flush=True)


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
