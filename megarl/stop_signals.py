"""The signals that stop a run, and how a rank's child processes outlive them.

Slurm sends them to all processes of a job, not only to ranks. A verifier or an environment that died of one would
change the rewards of the step that the run still finishes. A child therefore starts with the signals blocked
(`blocked`), installs handlers that do nothing (`outlive`), and is ended by its rank.
"""

import contextlib
import signal

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
