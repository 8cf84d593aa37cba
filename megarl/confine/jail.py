"""The sandbox script: confines one Python program, watches it, and reports how it ended.

`sandbox.run` starts it with `python -I -S`. The script itself stays outside: it forks process 1 of a PID namespace, and
waits. When process 1 ends, the kernel kills all its descendants, even daemonized ones, before the wait returns.
`signal`, `subprocess`, `tempfile` and the like are not imported, because every run pays for every import.
"""

import _signal  # without the enumerations of `signal`
import ctypes
import math
import os
import resource
import select
import struct
import sys
import time

_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
# What every program needs to run.
SYSTEM = ("/usr", "/bin", "/lib", "/lib64", os.path.realpath(sys.base_prefix), "/etc/ld.so.cache", *_DEVICES)

# Exit statuses of the script; Python itself fails with 1 or 2.
OK, ERROR, TIMEOUT, MEMORY, STOPPED, NO_SANDBOX = range(10, 16)

PROCESSES = 32  # and threads, of one program with all its descendants
OPEN_FILES = 32
FILES_BYTES = 64 << 20  # total size of the program's folder
_FILES = 4096
_TICK_MS = 20  # interval of the memory checks

_SIGKILL = 9
_NEWNS, _NEWUTS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
_ANY_NAMESPACE = 0x7E020000
_NOSUID, _NODEV, _NOEXEC, _BIND, _REC, _PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
_SET_PDEATHSIG, _SET_SECCOMP, _SET_NO_NEW_PRIVS = 1, 22, 38
_NOBODY = 65534
# Lines of a filter of system calls: operation, lines to skip if true, if false, operand.
LOAD, EQUAL, _AT_LEAST, ANY_BIT, _ANSWER = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, DENY = (_ANSWER, 0, 0, 0x7FFF0000), (_ANSWER, 0, 0, 0x50001)

# `site` would add exit and quit, but importing it takes longer than the rest of the start.
_PRELUDE = (
    "__import__('builtins').exit = __import__('builtins').quit = __import__('sys').exit\n"
    "exec(compile(open(3, 'rb').read(), 'program.py', 'exec'))"
)
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # so that the same program gets the same score again
    "MALLOC_ARENA_MAX": "1",  # one arena per thread would use up the address space
}

# Per machine: seccomp architecture; the denied system calls, which no task needs, but which allocate memory that no
# process accounts for, create namespaces, or reach what namespaces do not isolate (keys, kernel log); those denied
# for some first arguments: clone, clone3, socket, prctl; pivot_root.
CALLS = {
    "x86_64": (
        0xC000003E,
        # memfd_create, memfd_secret, shmget, msgget, semget, mq_open, unshare, setns, ptrace, process_vm_readv/writev,
        # keyctl, add_key, request_key, bpf, perf_event_open, userfaultfd, io_uring_setup, syslog
        (319, 447, 29, 68, 64, 240, 272, 308, 101, 310, 311, 250, 248, 249, 321, 298, 323, 425, 103),
        (56, 435, 41, 157),
        155,
    ),
    "aarch64": (
        0xC00000B7,
        (279, 447, 194, 186, 190, 180, 97, 268, 117, 270, 271, 219, 217, 218, 280, 241, 282, 425, 116),
        (220, 435, 198, 167),
        41,
    ),
}

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> int:
    """Run the program read from standard input, `source` followed by `stdin`; returns the exit status. Arguments:
    seconds, bytes of memory, the caller's process id, bytes of `source`, bytes of `stdin`. After these, one more byte
    on standard input, its end, or the caller's exit stops the program.
    """
    seconds, (memory, caller, *sizes) = float(sys.argv[1]), map(int, sys.argv[2:])
    with open(0, "rb", closefd=False) as stream:
        source, stdin = contents = [stream.read(size) for size in sizes]
    if [len(content) for content in contents] != sizes:
        return STOPPED  # the caller has exited meanwhile
    try:
        child = start(lambda uid, report: _become_program(source, stdin, uid, math.ceil(seconds), memory, report))
    except OSError as error:
        print(reason_of(error), file=sys.stderr)
        return NO_SANDBOX
    return _watch(child, caller, seconds, memory)


def start(become) -> int:
    """Fork process 1 of a new PID namespace, which calls `become(uid, report)`; return its pid once the program runs.
    `become` never returns: it confines the process for a program of this uid, writes `+` to the pipe `report`, and
    closes that, as exec does. OSError with the reason if it raises, or there is no such namespace.
    """
    result, report = os.pipe()
    uid = new_process_namespace()
    child = os.fork()
    if child == 0:
        try:
            os.close(result)
            # A new process group and session, so that kill(0, ...) reaches nothing outside.
            os.setsid()
            os.umask(0o022)
            with open("/proc/self/oom_score_adj", "w") as file:
                file.write("1000")
            become(uid, report)
        except BaseException as error:
            os.write(report, reason_of(error).encode())
        finally:
            os._exit(NO_SANDBOX)
    os.close(report)
    # One byte means: confined. End of file after it means: the program runs.
    answer = os.read(result, 1) + os.read(result, 1000)
    if answer != b"+":
        os.waitpid(child, 0)
        raise OSError(0, answer.lstrip(b"+").decode() or "process 1 died")
    return child


def _watch(child: int, caller: int, seconds: float, memory: int) -> int:
    """Wait for process 1 (`child`), or kill it at a limit; return the exit status. No process is left then."""
    try:
        os.setpriority(os.PRIO_PROCESS, 0, -10)  # so that the watcher is not starved by the program it watches
    except OSError:
        pass  # only root may
    verdict, deadline = None, time.monotonic() + seconds
    events = select.poll()
    for descriptor in (ended := os.pidfd_open(child), 0):
        events.register(descriptor, select.POLLIN)
    while verdict is None:
        left = (deadline - time.monotonic()) * 1000
        ready = [descriptor for descriptor, _ in events.poll(max(0, min(_TICK_MS, left)))]
        if ended in ready:
            break
        if ready or os.getppid() != caller:
            verdict = STOPPED
        elif time.monotonic() >= deadline:
            verdict = TIMEOUT
        elif memory_of(child) > memory:
            verdict = MEMORY
    if verdict is not None:
        os.kill(child, _SIGKILL)
        os.waitpid(child, 0)
        return verdict
    _, status, usage = os.wait4(child, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == _SIGKILL:
        # Nothing inside can kill process 1, so it was the CPU-time limit or the machine ran out of memory.
        return TIMEOUT if usage.ru_utime + usage.ru_stime > 0.9 * math.ceil(seconds) else MEMORY
    return OK if status == 0 else ERROR


def memory_of(pid: int) -> int:
    """Resident and swapped bytes of a process and its descendants, without mapped files; shared pages count for all."""
    total = 0
    try:
        with open(f"/proc/{pid}/status", "rb") as status:
            for line in status:
                if line.startswith((b"RssAnon:", b"RssShmem:", b"VmSwap:")):
                    total += int(line.split()[1]) << 10
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", "rb") as children:
                total += sum(memory_of(int(each)) for each in children.read().split())
    except (OSError, IndexError):
        pass  # it has ended meanwhile
    return total


def new_process_namespace() -> int:
    """Create the PID namespace whose process 1 the next fork becomes; return the program's uid, never root's."""
    if not os.path.exists(f"/proc/self/task/{os.getpid()}/children"):
        raise OSError(0, "no /proc/*/children (CONFIG_PROC_CHILDREN)")
    if os.uname().machine not in CALLS:
        raise OSError(0, f"no list of system calls for {os.uname().machine}, only for {', '.join(CALLS)}")
    uid = _unused_uid()
    if uid is not None and _libc.unshare(_NEWPID) == 0:
        return uid
    uid_map, gid_map = f"{_NOBODY} {os.geteuid()} 1", f"{_NOBODY} {os.getegid()} 1"
    call("unshare", _NEWUSER | _NEWPID)
    for name, text in ("setgroups", "deny"), ("uid_map", uid_map), ("gid_map", gid_map):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    return _NOBODY


def _unused_uid() -> int | None:
    """A uid unique to this run, because RLIMIT_NPROC counts per uid; None if this process may not change its uid."""
    if os.geteuid() != 0:
        return None
    with open("/proc/self/uid_map") as file:
        ranges = [[int(word) for word in line.split()] for line in file]
    for uid in (1_500_000_000 + os.getpid(), _NOBODY):
        if any(first <= uid < first + count for first, _, count in ranges):
            return uid
    return None


def _become_program(source, stdin, uid, cpu_seconds, memory, report) -> None:
    """Process 1: confine itself, then exec."""
    new_namespaces()
    build_root(SYSTEM, uid, min(FILES_BYTES, memory), _FILES)
    stdin_file, program = _unnamed_file(stdin), _unnamed_file(source)
    set_attributes(b"/", 1, recursive=False)
    os.chdir("/tmp")
    os.dup2(stdin_file, 0)
    os.dup2(program, 3)
    os.set_inheritable(3, True)
    limits = {"CPU": cpu_seconds, "AS": memory, "NPROC": PROCESSES, "NOFILE": OPEN_FILES, "FSIZE": FILES_BYTES}
    set_limits(limits | {"STACK": 8 << 20} | dict.fromkeys(("CORE", "MEMLOCK", "MSGQUEUE", "RTPRIO"), 0))
    become(uid)
    die_with_parent()
    os.write(report, b"+")  # fails, as intended, if the script outside is gone
    filter_calls()
    # Unblock the signals that the caller has blocked: without a handler, process 1 of a namespace does not get them
    # from outside. Not Ctrl-C, which Python would answer with an exception.
    _signal.signal(_signal.SIGINT, _signal.SIG_IGN)
    _signal.pthread_sigmask(_signal.SIG_SETMASK, ())
    python = sys.executable
    os.execve(python, [python, "-S", "-B", "-X", "utf8", "-c", _PRELUDE], _ENVIRONMENT)


def become(uid: int) -> None:
    """Become this user, without groups."""
    if os.geteuid() != uid:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)


def new_namespaces() -> None:
    """Give this process mounts, network, IPC and host name of its own; there is no network in it."""
    call("unshare", _NEWNS | _NEWNET | _NEWIPC | _NEWUTS)
    call("sethostname", b"sandbox", 7)


def build_root(
    shown: tuple[str, ...], uid: int, size: int, files: int, writable: tuple[str, ...] = (), proc: bool = False
) -> None:
    """Build a root folder with nothing but the paths `shown`, read-only, those `writable`, and an empty /tmp. `size`:
    bytes that /tmp holds; `files`: how many it holds; `uid`: its owner; `proc`: also /proc.
    """
    call("mount", None, b"/", None, _REC | _PRIVATE, None)
    call("mount", b"tmpfs", b"/tmp", b"tmpfs", _NOSUID | _NODEV, b"mode=755")
    os.chdir("/tmp")
    os.mkdir("outside")
    call("syscall", CALLS[os.uname().machine][3], b".", b"outside")
    os.chdir("/")
    os.mkdir("/tmp")
    options = f"mode=700,uid={uid},gid={uid},size={size},nr_inodes={files}"
    call("mount", b"tmpfs", b"/tmp", b"tmpfs", _NOSUID | _NODEV, options.encode())
    for path in shown:
        _show(path)
    for path in writable:
        _show(path, attributes=2)
    if proc:  # while the outer one is visible, without which a user namespace may have none
        os.mkdir("/proc")
        call("mount", b"proc", b"/proc", b"proc", _NOSUID | _NODEV | _NOEXEC, None)
    call("umount2", b"/outside", 2)
    os.rmdir("/outside")


def _show(path: str, attributes: int = 1 | 2) -> None:
    outside = "/outside" + path
    if os.path.lexists(path) or not os.path.lexists(outside):
        return None
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if os.path.islink(outside):
        return os.symlink(os.readlink(outside), path)
    if os.path.isdir(outside):
        os.mkdir(path)
    else:
        os.close(os.open(path, os.O_CREAT))
    call("mount", os.fsencode(outside), os.fsencode(path), None, _BIND | _REC, None)
    set_attributes(os.fsencode(path), attributes, recursive=True)


def set_attributes(path: bytes, attributes: int, recursive: bool) -> None:
    """Add attributes (1 read-only, 2 nosuid) to a mount, with mount_setattr of Linux 5.12."""
    call("syscall", 442, -100, path, 0x8000 if recursive else 0, struct.pack("4Q", attributes, 0, 0, 0), 32)


def _unnamed_file(content: bytes) -> int:
    with open("/content", "wb") as file:
        file.write(content)
    descriptor = os.open("/content", os.O_RDONLY)
    os.unlink("/content")
    return descriptor


def set_limits(limits: dict[str, int]) -> None:
    """Set resource limits of this process by name, where the system allows as much; they cannot be raised again."""
    for name, value in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends."""
    call("prctl", _SET_PDEATHSIG, _SIGKILL, 0, 0, 0)


def filter_calls(families: tuple[int, ...] = (1,)) -> None:
    """Install a seccomp filter that denies the calls of CALLS to this process and its descendants, irrevocably.
    `families`: of the sockets that it allows; by default AF_UNIX alone.
    """
    architecture, denied, (clone, clone3, socket, prctl), _ = CALLS[os.uname().machine]
    unknown = (_ANSWER, 0, 0, 0x50026)
    # The call's first argument is at offset 16. Calls of x32 are denied, too; they begin at 1 << 30.
    program = [*native_calls(architecture), (_AT_LEAST, 0, 1, 1 << 30), DENY]
    for number in denied:
        program += [(EQUAL, 0, 1, number), DENY]
    # ENOSYS makes libc fall back to clone, whose flags the filter can read.
    program += [(EQUAL, 0, 1, clone3), unknown]
    program += [(EQUAL, 0, 4, clone), (LOAD, 0, 0, 16), (ANY_BIT, 0, 1, _ANY_NAMESPACE), DENY, ALLOW]
    count = len(families)
    program += [(EQUAL, 0, 3 + count, socket), (LOAD, 0, 0, 16)]
    program += [(EQUAL, count - i, 0, family) for i, family in enumerate(families)] + [DENY, ALLOW]
    program += [(EQUAL, 0, 4, prctl), (LOAD, 0, 0, 16), (EQUAL, 0, 1, _SET_PDEATHSIG), DENY, ALLOW, ALLOW]
    install_filter(program)


def native_calls(architecture: int) -> list[tuple[int, int, int, int]]:
    """The first lines of a filter: deny calls of other architectures, then load the call's number."""
    return [(LOAD, 0, 0, 4), (EQUAL, 1, 0, architecture), DENY, (LOAD, 0, 0, 0)]


def install_filter(program: list[tuple[int, int, int, int]]) -> None:
    """Install a filter of system calls, irrevocably, given as lines of BPF (`LOAD` and the others)."""
    lines = (struct.pack("HBBI", code, if_true, if_false, value) for code, if_true, if_false, value in program)
    code = ctypes.create_string_buffer(b"".join(lines))
    call("prctl", _SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    call("prctl", _SET_SECCOMP, 2, struct.pack("HxxxxxxP", len(program), ctypes.addressof(code)), 0, 0)


def call(name: str, *arguments: int | bytes | None) -> None:
    """Call a function of the C library; OSError if it fails. Passes integers as 64 bits, as the kernel expects."""
    wide = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    if getattr(_libc, name)(*wide) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def reason_of(error: BaseException) -> str:
    return f"{error.strerror} {error.filename or ''}".strip() if isinstance(error, OSError) else repr(error)


if __name__ == "__main__":
    os._exit(main())  # skips the interpreter's slow shutdown
