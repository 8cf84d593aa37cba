"""A first rendering of a chat template in a child process with limits: templates come with folders of strangers.

One that loops for ever, or makes a text of gigabytes, ends the child and not the program.
"""

import os
import resource
import select
import signal
from collections.abc import Callable

SECONDS = 10  # of the processor
BYTES = 2**30  # of memory that rendering may add
_PATIENCE = 60.0  # seconds by the clock, for a machine that is busy


def problem_of(render: Callable[[], object]) -> str | None:
    """What is wrong with a function that compiles and renders a template; None if it returns or raises in time.

    What it raises is for the caller to see, who then calls it without limits.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        _render(render, writing)
    os.close(writing)
    try:
        ready, _, _ = select.select([reading], [], [], _PATIENCE)
        is_done = bool(ready) and os.read(reading, 1) == b"."
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return None if is_done else f"takes more than {SECONDS} s, or {BYTES // 2**30} GiB of memory, for one message"


def _render(render: Callable[[], object], writing: int):
    """The child; never returns."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        with open("/proc/self/statm", encoding="ascii") as file:
            size = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        resource.setrlimit(resource.RLIMIT_AS, (size + BYTES, size + BYTES))
        try:
            render()
        except BaseException as error:  # others than these the caller will see
            while error is not None:
                if isinstance(error, MemoryError):
                    os._exit(1)
                error = error.__context__
        os.write(writing, b".")
    finally:
        os._exit(0)
