"""The inside of the sandbox: a script that locks up one Python program, watches it, and tells how it ended.

`sandbox.run` starts it with `python -I -S`; `main` says what it reads. The script itself stays outside: it makes a
namespace of processes, forks what becomes process 1 in it, and waits. When process 1 ends or is killed, the kernel
kills all that descends from it, however it hid, and only then does the wait return: afterwards nothing is left.

`signal`, `subprocess`, `tempfile` and the like are not imported: each run pays for every import.
"""

import ctypes
import math
import os
import resource
import select
import struct
import sys
import time

# Exit statuses of the script; a Python that fails by itself ends with 1 or 2.
OK, ERROR, TIMEOUT, MEMORY, STOPPED, NO_SANDBOX = range(10, 16)

PROCESSES = 32  # and threads, of one program with all its descendants
OPEN_FILES = 32
FILES_BYTES = 64 << 20  # all that the program keeps in its folder
_FILES = 4096
_TICK_MS = 20  # how often memory is looked at

_SIGKILL = 9
_NEWNS, _NEWUTS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
_ANY_NAMESPACE = 0x7E020000
_NOSUID, _NODEV, _BIND, _REC, _PRIVATE = 2, 4, 4096, 16384, 1 << 18
_SET_PDEATHSIG, _SET_SECCOMP, _SET_NO_NEW_PRIVS = 1, 22, 38
_NOBODY = 65534

# exit and quit are what `site` would add, but it costs more than all the rest of the start.
_PRELUDE = (
    "__import__('builtins').exit = __import__('builtins').quit = __import__('sys').exit\n"
    "exec(compile(open(3, 'rb').read(), 'program.py', 'exec'))"
)
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # the same program gets the same score again
    "MALLOC_ARENA_MAX": "1",  # an arena for each thread would use up the address space
}

# Per machine: the architecture in seccomp's terms; numbers of the calls that nobody needs to solve a task, but that
# make memory which counts for no process, more namespaces, or reach what namespaces do not part (keys, kernel log);
# then those refused for some first argument: clone, clone3, socket, prctl; then pivot_root.
_CALLS = {
    "x86_64": (
        0xC000003E,
        # memfd_create, memfd_secret, shmget, msgget, semget, mq_open, unshare, setns, ptrace, process_vm_readv/writev,
        # keyctl, add_key, request_key, bpf, perf_event_open, userfaultfd, io_uring_setup, syslog
        (319, 447, 29, 68, 64, 240, 272, 308, 101, 310, 311, 250, 248, 249, 321, 298, 323, 425, 103),
        (56, 435, 41, 157), 155,
    ),
    "aarch64": (
        0xC00000B7,
        (279, 447, 194, 186, 190, 180, 97, 268, 117, 270, 271, 219, 217, 218, 280, 241, 282, 425, 116),
        (220, 435, 198, 167), 41,
    ),
}  # fmt: skip

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> int:
    """Run what standard input holds: `source` and `stdin`, one behind the other; the answer is the exit status.

    Arguments: seconds, bytes of memory, the caller's process id, bytes of `source`, bytes of `stdin`. Afterwards one
    more byte on standard input, its end, or the end of the caller means: stop.
    """
    seconds, (memory, caller, *sizes) = float(sys.argv[1]), map(int, sys.argv[2:])
    with open(0, "rb", closefd=False) as stream:
        source, stdin = contents = [stream.read(size) for size in sizes]
    if [len(content) for content in contents] != sizes:
        return STOPPED  # The caller has ended meanwhile.
    result, report = os.pipe()
    try:
        uid = _new_process_namespace()
        child = os.fork()
    except OSError as error:
        print(_reason(error), file=sys.stderr)
        return NO_SANDBOX
    if child == 0:
        _become_program(source, stdin, uid, math.ceil(seconds), memory, report, result)
    os.close(report)
    # One byte means: locked up. The end behind it: the program runs, as exec closed the pipe.
    said = os.read(result, 1) + os.read(result, 1000)
    if said != b"+":
        os.waitpid(child, 0)
        print(said.lstrip(b"+").decode() or "process 1 died", file=sys.stderr)
        return NO_SANDBOX
    return _watch(child, caller, seconds, memory)


def _watch(child: int, caller: int, seconds: float, memory: int) -> int:
    """Wait for process 1, `child` out here, or kill it where a limit is reached; nothing of it is left then."""
    try:
        os.setpriority(os.PRIO_PROCESS, 0, -10)  # a look must not wait behind what it looks at
    except OSError:
        pass  # Others than root may not.
    events, verdict, deadline = select.poll(), None, time.monotonic() + seconds
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
        elif _memory_of(child) > memory:
            verdict = MEMORY
    if verdict is not None:
        os.kill(child, _SIGKILL)
        os.waitpid(child, 0)
        return verdict
    _, status, usage = os.wait4(child, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == _SIGKILL:
        # Nothing inside can kill process 1: it was the limit of CPU time, or the machine was out of memory.
        return TIMEOUT if usage.ru_utime + usage.ru_stime > 0.9 * math.ceil(seconds) else MEMORY
    return OK if status == 0 else ERROR


def _memory_of(pid: int) -> int:
    """Bytes that a process and its descendants have in memory, without mapped files; shared pages count for each."""
    total = 0
    try:
        with open(f"/proc/{pid}/status", "rb") as status:
            for line in status:
                if line.startswith((b"RssAnon:", b"RssShmem:", b"VmSwap:")):
                    total += int(line.split()[1]) << 10
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", "rb") as children:
                total += sum(_memory_of(int(each)) for each in children.read().split())
    except (OSError, IndexError):
        pass  # It has ended meanwhile.
    return total


def _new_process_namespace() -> int:
    """The namespace that the next fork is process 1 of; the uid that the program gets, never root's."""
    if not os.path.exists(f"/proc/self/task/{os.getpid()}/children"):
        raise OSError(0, "no /proc/*/children (CONFIG_PROC_CHILDREN)")
    if os.uname().machine not in _CALLS:
        raise OSError(0, f"no list of system calls for {os.uname().machine}, only for {', '.join(_CALLS)}")
    uid = _unused_uid()
    if uid is not None and _libc.unshare(_NEWPID) == 0:
        return uid
    uid_map, gid_map = f"{_NOBODY} {os.geteuid()} 1", f"{_NOBODY} {os.getegid()} 1"
    _call("unshare", _NEWUSER | _NEWPID)
    for name, text in ("setgroups", "deny"), ("uid_map", uid_map), ("gid_map", gid_map):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    return _NOBODY


def _unused_uid() -> int | None:
    """A uid of this run's own, as RLIMIT_NPROC counts by uid; None if this process may not take another's."""
    if os.geteuid() != 0:
        return None
    with open("/proc/self/uid_map") as file:
        ranges = [[int(word) for word in line.split()] for line in file]
    for uid in (1_500_000_000 + os.getpid(), _NOBODY):
        if any(first <= uid < first + count for first, _, count in ranges):
            return uid
    return None


def _become_program(source, stdin, uid, cpu_seconds, memory, report, result) -> None:
    """Process 1: lock up, then exec; does not return. What goes wrong is written to the pipe `report`."""
    try:
        os.close(result)
        # A process group and session of its own: kill(0, ...) reaches nothing outside.
        os.setsid()
        os.umask(0o022)
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
        _call("unshare", _NEWNS | _NEWNET | _NEWIPC | _NEWUTS)
        _call("sethostname", b"sandbox", 7)
        _build_root(uid, min(FILES_BYTES, memory))
        given, program = _unnamed_file(stdin), _unnamed_file(source)
        _set_attributes(b"/", 1, recursive=False)
        os.chdir("/tmp")
        os.dup2(given, 0)
        os.dup2(program, 3)
        os.set_inheritable(3, True)
        _limit(cpu_seconds, memory)
        if os.geteuid() != uid:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
        _call("prctl", _SET_PDEATHSIG, _SIGKILL, 0, 0, 0)
        os.write(report, b"+")  # Fails, as it should, if the script outside is gone already.
        filter_calls()
        python = sys.executable
        os.execve(python, [python, "-S", "-B", "-X", "utf8", "-c", _PRELUDE], _ENVIRONMENT)
    except BaseException as error:
        os.write(report, _reason(error).encode())
    finally:
        os._exit(NO_SANDBOX)


def _build_root(uid: int, size: int) -> None:
    """A root folder with the system's libraries and Python, for reading, and an empty /tmp; nothing else is there."""
    _call("mount", None, b"/", None, _REC | _PRIVATE, None)
    _call("mount", b"tmpfs", b"/tmp", b"tmpfs", _NOSUID | _NODEV, b"mode=755")
    os.chdir("/tmp")
    os.mkdir("outside")
    _call("syscall", _CALLS[os.uname().machine][3], b".", b"outside")
    os.chdir("/")
    for path in ("/usr", "/bin", "/lib", "/lib64", os.path.realpath(sys.base_prefix)):
        _show(path)
    for path in ("/etc/ld.so.cache", "/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"):
        _show(path)
    os.mkdir("/tmp")
    options = f"mode=700,uid={uid},gid={uid},size={size},nr_inodes={_FILES}"
    _call("mount", b"tmpfs", b"/tmp", b"tmpfs", _NOSUID | _NODEV, options.encode())
    _call("umount2", b"/outside", 2)
    os.rmdir("/outside")


def _show(path: str) -> None:
    """Make a file or folder of the outside visible at the same place, for reading."""
    outside = "/outside" + path
    if os.path.lexists(path) or not os.path.lexists(outside):
        return
    if os.path.islink(outside):
        return os.symlink(os.readlink(outside), path)
    if os.path.isdir(outside):
        os.makedirs(path)
    else:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.close(os.open(path, os.O_CREAT))
    _call("mount", outside.encode(), path.encode(), None, _BIND | _REC, None)
    _set_attributes(path.encode(), 1 | 2, recursive=True)


def _set_attributes(path: bytes, attributes: int, recursive: bool) -> None:
    """Add attributes (1 read-only, 2 nosuid) to a mount, with mount_setattr of Linux 5.12."""
    _call("syscall", 442, -100, path, 0x8000 if recursive else 0, struct.pack("4Q", attributes, 0, 0, 0), 32)


def _unnamed_file(content: bytes) -> int:
    with open("/content", "wb") as file:
        file.write(content)
    descriptor = os.open("/content", os.O_RDONLY)
    os.unlink("/content")
    return descriptor


def _limit(cpu_seconds: int, memory: int) -> None:
    limits = {"CPU": cpu_seconds, "AS": memory, "NPROC": PROCESSES, "NOFILE": OPEN_FILES, "FSIZE": FILES_BYTES}
    limits |= {"STACK": 8 << 20, "CORE": 0, "MEMLOCK": 0, "MSGQUEUE": 0, "RTPRIO": 0}
    for name, value in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def filter_calls() -> None:
    """Have the kernel refuse the calls of _CALLS to this process and all its descendants; it cannot be undone."""
    architecture, refused, (clone, clone3, socket, prctl), _ = _CALLS[os.uname().machine]
    load, equal, at_least, any_bit, answer = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, deny, unknown = (answer, 0, 0, 0x7FFF0000), (answer, 0, 0, 0x50001), (answer, 0, 0, 0x50026)
    # Each line: operation, lines to skip if true, if false, operand. The call's number lies at 0, its first argument
    # at 16. Another architecture's calls are refused whole, and x32's, which begin at 1 << 30.
    program = [(load, 0, 0, 4), (equal, 1, 0, architecture), deny, (load, 0, 0, 0), (at_least, 0, 1, 1 << 30), deny]
    for number in refused:
        program += [(equal, 0, 1, number), deny]
    # "No such call" has libc use clone, whose flags can be seen from here.
    program += [(equal, 0, 1, clone3), unknown]
    program += [(equal, 0, 4, clone), (load, 0, 0, 16), (any_bit, 0, 1, _ANY_NAMESPACE), deny, allow]
    program += [(equal, 0, 4, socket), (load, 0, 0, 16), (equal, 1, 0, 1), deny, allow]  # 1: AF_UNIX
    program += [(equal, 0, 4, prctl), (load, 0, 0, 16), (equal, 0, 1, _SET_PDEATHSIG), deny, allow, allow]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    _call("prctl", _SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _call("prctl", _SET_SECCOMP, 2, struct.pack("HxxxxxxP", len(program), ctypes.addressof(code)), 0, 0)


def _call(name: str, *arguments: int | bytes | None) -> None:
    """A function of the C library; OSError where it fails. Whole numbers go as 64 bits, as the kernel reads them."""
    wide = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    if getattr(_libc, name)(*wide) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _reason(error: BaseException) -> str:
    return f"{error.strerror} {error.filename or ''}".strip() if isinstance(error, OSError) else repr(error)


if __name__ == "__main__":
    os._exit(main())  # Tearing the interpreter down takes longer than the rest of what is left to do.
