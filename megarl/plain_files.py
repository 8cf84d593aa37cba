"""The one reader of files that a user names: regular ones, of bounded size, in UTF-8; and the one line for any failure.

A pipe would block for ever, and a device such as /dev/zero never ends. A file made for harm can make a parser raise
anything, so `reading` turns every exception into a UsageError.
"""

import codecs
import contextlib
import errno
import json
import math
import os
import re
import resource
import select
import signal
import stat
from collections.abc import Callable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any

from megarl.errors import UsageError, one_line
from megarl.plain_values import MAX_DIGITS

MAX_BYTES = 2**28  # of a file that a program writes
MAX_WRITTEN = 2**20  # of a text that a person writes
MAX_RECORDS = 2**32  # of a file to which a run adds a line of JSON at each step
MAX_REASON = 300  # characters of an exception in a message


def check_regular(path: str | Path, max_bytes: int | None = None):
    """OSError unless the path is a regular file, or a link to one, of at most `max_bytes`; None: of any size. For files
    that a library opens by their path.
    """
    _check(os.stat(path), max_bytes)


def _check(found: os.stat_result, max_bytes: int | None):
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "is no regular file")
    if max_bytes is not None and found.st_size > max_bytes:
        raise OSError(errno.EFBIG, f"has {found.st_size:,} bytes; allowed are {max_bytes:,}")


def resolved(path: str | Path) -> Path:
    """The path without links, as `Path.resolve`, which raises RuntimeError for links in a circle. Raises nothing."""
    return Path(os.path.realpath(path))


def is_absent(path: str | Path) -> bool:
    """Whether nothing has this name. A link to nothing has it: somebody meant a file to be there."""
    return not os.path.lexists(path)


def open_bytes(path: str | Path, max_bytes: int | None = None) -> BufferedReader:
    """A regular file, open for reading. OSError for others, and for one of more than `max_bytes`; None: of any size."""
    # Opened first and checked then: in between, another process might put a pipe there, on which `open` would wait.
    file = open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    try:
        _check(os.fstat(file.fileno()), max_bytes)
    except OSError:
        file.close()
        raise
    return file


def read_bytes(path: str | Path, max_bytes: int = MAX_BYTES) -> bytes:
    """The content of a regular file. OSError as `open_bytes`."""
    with open_bytes(path, max_bytes) as file:
        return file.read(max_bytes)


def read_text(path: str | Path, max_bytes: int = MAX_WRITTEN) -> str:
    """The text of a regular file in UTF-8, without a byte order mark. OSError as `read_bytes`; UnicodeDecodeError."""
    return read_bytes(path, max_bytes).removeprefix(codecs.BOM_UTF8).decode("utf-8")


def read_json(path: str | Path, max_bytes: int = MAX_BYTES) -> Any:
    """The value in a JSON file. OSError as `read_bytes`; ValueError or RecursionError if it is none."""
    return parse_json(read_text(path, max_bytes))


def parse_json(text: str) -> Any:
    """A value of JSON. ValueError for a whole number that no float holds, and for a name that has two values."""
    return json.loads(text, parse_int=_whole_number, object_pairs_hook=_object)


def read_records(path: str | Path) -> list[bytes]:
    """The lines of a file of JSON lines, without the empty ones at its end. OSError as `read_bytes`. The newline byte
    alone ends a line: text may contain other characters that `splitlines` treats as line ends.
    """
    lines = read_bytes(path, MAX_RECORDS).split(b"\n")
    while lines and not lines[-1].strip():
        lines.pop()
    return lines


def parse_record(line: bytes) -> dict[str, Any] | None:
    """The object in a line that a run has written; None if it is none, whatever is wrong. Its numbers are finite: NaN
    and others that no float holds read as None."""
    try:
        record = json.loads(line, parse_int=_whole_number, parse_float=_finite, parse_constant=lambda name: None)
    except (ValueError, RecursionError):  # also malformed UTF-8
        return None
    return record if isinstance(record, dict) else None


def _finite(text: str) -> float | None:
    number = float(text)
    return number if math.isfinite(number) else None


def _whole_number(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"a number has {len(text):,} digits; allowed are {MAX_DIGITS}")
    return int(text)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        for name, value in pairs:
            if repr(found[name]) != repr(value):  # NaN is not equal to itself
                raise ValueError(f"{name!r} appears twice, with two values")
    return found


@contextlib.contextmanager
def reading(where: str, problem: str = "cannot be read", missing: str | None = None) -> Iterator[None]:
    """Context that reads and checks files: whatever is raised in it becomes one line. A UsageError stays as it is.
    `where`: flag and file, the start of the line. `problem`: what the line says before the reason. `missing`: what it
    says of a file that does not exist; default: the same. UsageError: "WHERE: PROBLEM (REASON)".
    """
    try:
        yield
    except UsageError:
        raise
    except Exception as error:  # a file made for harm can raise anything
        is_missing = missing is not None and isinstance(error, FileNotFoundError)
        raise UsageError(one_line(f"{where}: {missing if is_missing else f'{problem} ({reason_of(error)})'}")) from None


def reason_of(error: Exception) -> str:
    """What an exception says about a file, on one line of bounded length."""
    if isinstance(error, UnicodeDecodeError):
        return f"it is not UTF-8: byte {error.start}"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = " ".join(str(error).split())[:MAX_REASON]
    return text if isinstance(error, ValueError) and text else f"{type(error).__name__}: {text}"


_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"
ALLOWED = "each name once, of letters, digits, _, . and -"


def parse_named_paths(text: str) -> dict[str, str]:
    """`math=DIR code=DIR` -> the path of each name, in this order. ValueError for anything else, or a name twice."""
    found: dict[str, str] = {}
    for entry in re.split(rf"\s+(?={_NAME}=)", text.strip()):
        name, _, path = entry.partition("=")
        if not re.fullmatch(_NAME, name) or not path or name in found:
            raise ValueError(entry)
        found[name] = path
    return found


# -- a first reading with limits -----------------------------------------------------------------------------------

# Of templates, footers and patterns, in a child process: one that loops for ever, takes gigabytes, or ends the process
# (the libraries in C++ that read it do, for some damages), ends the child and not the program.

CHILD_SECONDS = 10  # of the processor
CHILD_BYTES = 2**30  # of memory that it may add
_CHILD_PATIENCE = 60.0  # seconds by the clock, for a machine that is busy


def child_limits() -> str:
    return f"{CHILD_SECONDS} s, or {CHILD_BYTES // 2**30} GiB of memory"


def ends_in_child(work: Callable[[], object]) -> bool:
    """Whether a function returns or raises within the limits, in a fork of this process.

    What it raises is for the caller to see, who then calls it without limits.
    """
    own, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        _try_in_child(work, theirs)
    os.close(theirs)
    try:
        ready, _, _ = select.select([own], [], [], _CHILD_PATIENCE)
        return bool(ready) and os.read(own, 1) == b"."
    finally:
        os.close(own)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _try_in_child(work: Callable[[], object], writing: int):
    """The child; never returns."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        with open("/proc/self/statm", encoding="ascii") as file:
            size = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (CHILD_SECONDS, CHILD_SECONDS))
        resource.setrlimit(resource.RLIMIT_AS, (size + CHILD_BYTES, size + CHILD_BYTES))
        try:
            work()
        except BaseException as error:  # others than these the caller will see
            while error is not None:
                if isinstance(error, MemoryError):
                    os._exit(1)
                error = error.__context__
        os.write(writing, b".")
    finally:
        os._exit(0)
