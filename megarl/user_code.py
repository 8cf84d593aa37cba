"""Errors in the user's code: where it raised, and the part of a traceback that is about it."""

import os
import sysconfig
import traceback
from pathlib import Path

from megarl.errors import TooManyFailures

FULL = "MEGARL_TRACEBACK"  # environment variable: `full` shows the whole traceback
_MEGARL = str(Path(__file__).parent)
# Folders of megarl, of packages and of Python; and modules without a file.
_NOT_THE_USERS = (_MEGARL, *(sysconfig.get_path(name) for name in ("purelib", "stdlib")), "<")


def place_of(error: BaseException) -> str:
    """` (FILE:LINE)` where code of the user that megarl called raised, or called what did; "" if none ran."""
    _, frames = _own_frames(error)
    own = [frame for frame in frames if not frame.filename.startswith(_NOT_THE_USERS)]
    return f" ({own[-1].filename}:{own[-1].lineno})" if own else ""


def shows_all() -> bool:
    """Whether `FULL` asks for whole tracebacks, of all ranks."""
    return os.environ.get(FULL) == "full"


def traceback_of(error: BaseException) -> str:
    """The user's frames; the whole traceback if there are none, or if `FULL` asks for it. "" if the error itself has
    the reasons and places."""
    source, frames = _own_frames(error)
    if shows_all() or not frames and not isinstance(error, TooManyFailures):
        return "".join(traceback.format_exception(error))
    if not frames:
        return ""
    own = [frame for frame in frames if not frame.filename.startswith(_NOT_THE_USERS)]
    lines = ["Traceback of your code:\n", *traceback.format_list(own)]
    return "".join([*lines, *traceback.format_exception_only(source), f"{FULL}=full shows all of it.\n"])


def _own_frames(error: BaseException | None) -> tuple[BaseException | None, list[traceback.FrameSummary]]:
    """The error, or the one that caused it, in which megarl called the user's code; its frames from there on."""
    while error is not None:
        frames = traceback.extract_tb(error.__traceback__)
        begun = False
        for i, frame in enumerate(frames):
            begun |= frame.filename.startswith(_MEGARL)
            if begun and not frame.filename.startswith(_NOT_THE_USERS):
                return error, frames[i:]
        error = error.__cause__ or error.__context__
    return None, []
