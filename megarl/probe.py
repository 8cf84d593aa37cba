"""A first reading of files of strangers, in a child process with limits: templates, footers, patterns.

One that loops for ever, takes gigabytes, or ends the process (the libraries in C++ that read it do, for some damages),
ends the child and not the program.
"""

import os
import resource
import select
import signal
from collections.abc import Callable

SECONDS = 10  # of the processor
BYTES = 2**30  # of memory that it may add
_PATIENCE = 60.0  # seconds by the clock, for a machine that is busy


def limits() -> str:
    return f"{SECONDS} s, or {BYTES // 2**30} GiB of memory"


def ends(work: Callable[[], object]) -> bool:
    """Whether a function returns or raises within the limits, in a fork of this process.

    What it raises is for the caller to see, who then calls it without limits.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        _try(work, writing)
    os.close(writing)
    try:
        ready, _, _ = select.select([reading], [], [], _PATIENCE)
        return bool(ready) and os.read(reading, 1) == b"."
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _try(work: Callable[[], object], writing: int):
    """The child; never returns."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        with open("/proc/self/statm", encoding="ascii") as file:
            size = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        resource.setrlimit(resource.RLIMIT_AS, (size + BYTES, size + BYTES))
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
