"""Confines the calling process for good to computing: it may read files, allocate memory, and write to open pipes.

A system-call filter (seccomp) lists the calls that are allowed; all others fail with EPERM. There is none to start a
process, open a file for writing, change or remove one, use the network, or signal another process. It needs no
privilege, so it also works in containers that forbid namespaces; `jail` is the sandbox for whole programs.
"""

import math
import os

from megarl.confine import jail
from megarl.confine.jail import ALLOW, ANY_BIT, DENY, EQUAL, LOAD

_WRITES = 0o3 | 0o100 | 0o1000 | 0o2000 | 0o20000000  # O_ACCMODE, O_CREAT, O_TRUNC, O_APPEND, O_TMPFILE
# read, write, close, fstat, newfstatat, lseek, mmap, mprotect, munmap, brk, mremap, madvise, rt_sigprocmask,
# rt_sigaction, rt_sigreturn, sigaltstack, pread64, faccessat, faccessat2, readlinkat, getdents64, statx, getcwd,
# futex, sched_yield, sched_getaffinity, getpid, gettid, getuid, geteuid, getgid, getegid, clock_gettime,
# clock_nanosleep, gettimeofday, times, getrusage, getrandom, restart_syscall, exit, exit_group; then the older forms
# that only x86-64 has: stat, lstat, poll, access, readlink, time. Last: openat.
_ALLOWED = {
    "x86_64": (
        (0, 1, 3, 5, 262, 8, 9, 10, 11, 12, 25, 28, 14, 13, 15, 131, 17, 269, 439, 267, 217, 332, 79, 202, 24, 204, 39,
         186, 102, 107, 104, 108, 228, 230, 96, 100, 98, 318, 219, 60, 231, 4, 6, 7, 21, 89, 201), 257,
    ),
    "aarch64": (
        (63, 64, 57, 80, 79, 62, 222, 226, 215, 214, 216, 233, 135, 134, 139, 132, 67, 48, 439, 78, 61, 291, 17, 98,
         124, 123, 172, 178, 174, 175, 176, 177, 113, 115, 169, 153, 165, 278, 128, 93, 94), 56,
    ),
}  # fmt: skip


def confine(keep: int, seconds: float | None, memory: int):
    """Confine this process: of its files only the descriptor `keep` stays; `memory` more bytes of address space. It
    dies with its parent. `seconds` bound its CPU time (rounded up); None: no bound. OSError if this machine has no such
    filter.
    """
    machine = os.uname().machine
    if machine not in _ALLOWED:
        raise OSError(0, f"no list of system calls for {machine}, only for {', '.join(_ALLOWED)}")
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    os.closerange(3, keep)
    os.closerange(keep + 1, 1 << 16)
    jail.die_with_parent()
    with open("/proc/self/statm", "rb") as file:
        used = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    limits = {"AS": used + memory, "FSIZE": 0, "CORE": 0, "NOFILE": 64}
    limits |= {} if seconds is None else {"CPU": math.ceil(seconds)}
    jail.set_limits(limits)
    _filter_calls(*_ALLOWED[machine], jail.CALLS[machine][0])


def _filter_calls(allowed: tuple[int, ...], openat: int, architecture: int):
    program = jail.native_calls(architecture)
    for number in allowed:
        program += [(EQUAL, 0, 1, number), ALLOW]
    # The flags of openat are its third argument, at offset 32.
    program += [(EQUAL, 1, 0, openat), DENY, (LOAD, 0, 0, 32), (ANY_BIT, 0, 1, _WRITES), DENY, ALLOW]
    jail.install_filter(program)


def works() -> str | None:
    """None if a confined process really can do none of what it must not, else the reason; forks one to try."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            confine(write, 10.0, 1 << 28)
            os.write(write, b"; ".join(name.encode() for name in _TRIALS if not _refused(_TRIALS[name])) or b"+")
        except BaseException as error:
            os.write(write, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(read, "rb") as stream:
        answer = stream.read()
    os.waitpid(child, 0)
    return None if answer == b"+" else f"in a confined process: {answer.decode() or 'it died'}"


def _socket():
    import _socket as sockets

    sockets.socket()


_TRIALS = {
    "a process could be started": lambda: os.fork() or os._exit(1),
    "a program could be run": lambda: os.execv("/nonexistent", ["none"]),
    "a file could be written": lambda: os.open("/dev/null", os.O_WRONLY),
    "a file could be removed": lambda: os.unlink("/nonexistent"),
    "another process could be signalled": lambda: os.kill(os.getppid(), 0),
    "the network could be used": _socket,
}


def _refused(trial) -> bool:
    try:
        trial()
    except PermissionError:
        return True
    except OSError:
        pass
    return False
