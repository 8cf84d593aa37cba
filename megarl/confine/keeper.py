"""The keeper of an agent's program: `python -I -S keeper.py BYTES COMMAND...`. Nothing of the program outlives it.

It starts the program, and kills it with all of its descendants, daemons included, when the program ends or when its own
standard input closes, so also when the process that started it is gone. Its exit status is the program's, 128 + N for a
signal N. BYTES limits each file that the program writes.
"""

import ctypes
import os
import resource
import select
import signal
import sys

_SET_CHILD_SUBREAPER = 36
NOT_STARTED = 127


def main() -> int:
    """Runs the command; returns the exit status."""
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans become its children
    limit = int(sys.argv[1])
    program = os.fork()
    if program == 0:
        _become(sys.argv[2:], limit)
    events = select.poll()
    events.register(os.pidfd_open(program), select.POLLIN)
    events.register(0, select.POLLIN | select.POLLHUP)
    events.poll()
    status = os.waitpid(program, os.WNOHANG)
    _kill_descendants()
    if status[0] == 0:
        return 128 + signal.SIGKILL
    code = os.waitstatus_to_exitcode(status[1])
    return code if code >= 0 else 128 - code


def _become(command: list, limit: int):
    os.setsid()
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(NOT_STARTED)


def _kill_descendants():
    """Stops all, so that none starts others meanwhile, then kills them, until there is none."""
    while True:
        found = _descendants(os.getpid())
        for pid in found:
            _signal(pid, signal.SIGSTOP)
        if set(_descendants(os.getpid())) - set(found):
            continue
        for pid in found:
            _signal(pid, signal.SIGKILL)
        try:
            while True:
                os.waitpid(-1, 0)  # also those that become its children when their parents end
        except ChildProcessError:
            return


def _descendants(pid: int) -> list:
    found = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as children:
                for child in children.read().split():
                    found += [int(child), *_descendants(int(child))]
    except OSError:
        pass  # it has ended meanwhile
    return found


def _signal(pid: int, number: int):
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


if __name__ == "__main__":
    sys.exit(main())
