"""Signs of progress of this process, for its heartbeat. Imports nothing, so every package may report progress.

A phase that begins or ends, a micro-batch, a decode step and a scored sample are progress. Collectives and file
traffic are counted elsewhere (`megarl/faults/heartbeat.py`).
"""

from collections.abc import Iterator
from contextlib import contextmanager

_ticks = 0
_limited = 0  # open `limited` blocks


def tick():
    """Reports progress: one piece of work is done. Costs less than a microsecond."""
    global _ticks
    _ticks += 1  # by one thread; a lost tick of another would not matter


@contextmanager
def limited() -> Iterator[None]:
    """Body that waits for something with a time limit of its own, such as a remote reward: it counts as progress."""
    global _limited
    _limited += 1
    try:
        yield
    finally:
        _limited -= 1
        tick()


def ticks() -> int:
    """Progress since the process started. Inside `limited` every call returns more."""
    if _limited:
        tick()
    return _ticks
