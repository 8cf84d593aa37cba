"""Child processes of a rank, with a connection of `multiprocessing` for messages in both directions; and the signals
that stop a run, which they outlive.

A `Child` runs `python -m MODULE FD ARGUMENTS...`; the main function of MODULE begins with `parent()`. A child ends when
the other end of its connection closes. What it prints goes to stderr.

Slurm sends the signals to all processes of a job, not only to ranks. A verifier or an environment that died of one
would change the rewards of the step that the run still finishes. A child therefore starts with the signals blocked
(`blocked`), installs handlers that do nothing (`outlive`), and is ended by its rank.
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

from megarl.cluster import cpu_cores


class Child:
    """One child process, in a session of its own, so that it ends with all that it has started."""

    def __init__(
        self,
        module: str,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        descriptors: Sequence[int] = (),
    ):
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
        with theirs, blocked(), cpu_cores.unbound():
            command = [sys.executable, "-P", "-m", module, str(theirs.fileno()), *arguments]
            kept = [theirs.fileno(), *descriptors]
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=2, pass_fds=kept, start_new_session=True, env=variables
            )

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
    outlive()
    if dies_with_thread and sys.platform == "linux":
        die_with_parent()
    connection = Connection(int(sys.argv[1]))
    os.set_inheritable(connection.fileno(), False)
    return connection


STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)  # preemption, Ctrl-C, Slurm's warning of a time limit


@contextlib.contextmanager
def blocked():
    """Blocks the signals in this thread, and in processes that it starts meanwhile until they call `outlive`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def outlive():
    """From now on the signals do nothing in this process and those that it forks; to be called in the main thread.

    Programs that it starts are free to use these signals.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, _nothing)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def _nothing(number, frame):
    """Unlike SIG_IGN, a handler ends with the process's program: `exec` brings the default back."""
