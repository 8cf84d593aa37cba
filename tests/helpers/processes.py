"""The processes that descend from one, signals to all of them, and limits and ports of this one."""

import contextlib
import os
import resource
import socket
import threading
from pathlib import Path

from megarl.child_process import STOP_SIGNALS


def descendants(pid: int) -> list[int]:
    """The process ids of all that descends from `pid`."""
    found = []
    with contextlib.suppress(OSError):  # it has ended meanwhile
        for thread in os.listdir(f"/proc/{pid}/task"):
            for child in Path(f"/proc/{pid}/task/{thread}/children").read_text().split():
                found += [int(child), *descendants(int(child))]
    return found


@contextlib.contextmanager
def signalled_descendants():
    """Meanwhile all descendants of this process get the signals that stop a run, over and over, from their first
    moment on; yields the set of those that got any."""
    is_over, reached = threading.Event(), set()

    def send():
        while not is_over.wait(0.005):
            for pid in descendants(os.getpid()):
                for number in STOP_SIGNALS:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)
                        reached.add(pid)

    sender = threading.Thread(target=send)
    sender.start()
    try:
        yield reached
    finally:
        is_over.set()
        sender.join()


@contextlib.contextmanager
def max_file_size(count: int):
    """Meanwhile this process can write no file of more than so many bytes, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def free_port() -> int:
    """A port of this machine on which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
