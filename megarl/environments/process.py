"""A worker process as its pool sees it, and the check that environments can be made."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing import Pipe

from megarl import stop_signals
from megarl.errors import UsageError


class WorkerProcess:
    """One process with environments; `episodes` are the numbers of those that it has."""

    def __init__(self, timeout: float):
        """Starts it. `timeout`: seconds that a call of an environment may take."""
        self.episodes: set[int] = set()
        self.connection, theirs = Pipe()
        with theirs, stop_signals.blocked():
            # A new session, so that what environments start can be killed with it. What they print goes to stderr.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "megarl.environments.worker", str(theirs.fileno()), repr(timeout)],
                stdin=subprocess.DEVNULL, stdout=2, pass_fds=[theirs.fileno()], start_new_session=True,
                env=_environment(),
            )  # fmt: skip

    def send(self, message: object):
        """Sends a message; if the process has died, the pool finds out when it reads."""
        with contextlib.suppress(OSError):
            self.connection.send(message)

    def status(self) -> int | None:
        """Exit status; None if it still runs after its connection was closed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1.0)
        return self._process.poll()

    def end(self):
        """Kills it with all that it has started."""
        # The group before its leader is reaped: afterwards the kernel may reuse the number.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self.connection.close()


def check_factories(names: Sequence[str]) -> dict[str, bool]:
    """For each environment, whether it has tools. UsageError for one that cannot be made.

    A process of its own makes them, so that a user's module is never imported by a rank.
    """
    result = subprocess.run(
        [sys.executable, "-P", "-m", "megarl.environments.check", *names], stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, text=True, env=_environment(), start_new_session=True, check=False,
    )  # fmt: skip
    lines = result.stdout.splitlines()
    if result.returncode:
        raise UsageError(lines[-1] if lines else f"--environment: the check ended with status {result.returncode}")
    return {name: line == "tools" for name, line in zip(names, lines[-len(names) :], strict=True)}


def _environment() -> dict[str, str]:
    # Sets in the same order in each process: an environment that is played again may depend on it.
    own = {"PYTHONHASHSEED": "0", "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path)}
    return os.environ | own
