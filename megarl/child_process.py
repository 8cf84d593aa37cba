"""Child processes of a rank, with a connection of `multiprocessing` for messages in both directions.

A `Child` runs `python -m MODULE FD ARGUMENTS...`; the main function of MODULE begins with `parent()`. A child ends when
the other end of its connection closes. What it prints goes to stderr.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from megarl import stop_signals
from megarl.cluster import cpu_cores


class Child:
    """One child process, in a session of its own, so that it ends with all that it has started."""

    def __init__(
        self, module: str, *arguments: str, environment: Mapping[str, str] | None = None,
        descriptors: Sequence[int] = (),
    ):  # fmt: skip
        """Starts it.

        Args:
            module: that the process runs.
            arguments: of its command line, after the connection's file descriptor.
            environment: its variables, without PYTHONPATH; None: those of this process.
            descriptors: file descriptors that it inherits beside the connection's.
        """
        self.connection, theirs = Pipe()
        variables = dict(os.environ if environment is None else environment)
        # With it a child finds the modules that this process finds.
        variables["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, sys.path))
        with theirs, stop_signals.blocked(), cpu_cores.unbound():
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(theirs.fileno()), *arguments], stdin=subprocess.DEVNULL,
                stdout=2, pass_fds=[theirs.fileno(), *descriptors], start_new_session=True, env=variables,
            )  # fmt: skip

    def send(self, message: object):
        """Sends a message; if the process has died, the next `connection.recv` raises EOFError or OSError."""
        with contextlib.suppress(OSError):
            self.connection.send(message)

    def status(self, seconds: float = 1.0) -> int | None:
        """Exit status, after waiting at most `seconds` for it; None if the process still runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=seconds)
        return self.process.poll()

    def lives(self) -> bool:
        """Whether the process still runs."""
        return self.process.poll() is None

    def end(self):
        """Kills it with all that it has started."""
        # The group before its leader is reaped: afterwards the kernel may reuse the number.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.connection.close()


def die_with_parent():
    """Has the kernel kill this process when the thread that started it ends, even in the middle of work."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def parent(dies_with_thread: bool = True) -> Connection:
    """In the child: its connection. From then on the signals that stop a run do nothing in it.

    Args:
        dies_with_thread: as of `die_with_parent`.
    """
    stop_signals.outlive()
    if dies_with_thread and sys.platform == "linux":
        die_with_parent()
    connection = Connection(int(sys.argv[1]))
    os.set_inheritable(connection.fileno(), False)
    return connection
