"""The sandbox of an agent's program: `python -I -S agent_jail.py SPECIFICATION`, in the place of `keeper.py`.

The program sees the system's files and those that the specification (`agent_sandbox.py`) names, read-only, a folder of
its own, an empty /tmp, and a relay to the episode's endpoint as its network. This script stays outside and watches;
when process 1 inside ends, the kernel kills all others. It ends with the program's status, 128 + N for a signal N, 137
also at a limit, and with 126 if this machine allows no sandbox. The end of its standard input stops it.
"""

import fcntl
import json
import os
import select
import signal
import socket
import struct
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from megarl.confine import jail  # `-I` has left out the project's path

NO_SANDBOX, NOT_STARTED = 126, 127
MAX_CONNECTIONS = 64
_TICK_MS = 200  # between two looks at memory and disk
_SET_DUMPABLE = 4
_UNIX, _INET, _INET6 = 1, 2, 10
_UP = struct.pack("16sh14x", b"lo", 1)
_SET_INTERFACE_FLAGS = 0x8914
_OF_ETC = """alternatives ca-certificates group hosts ld.so.conf ld.so.conf.d localtime mime.types nsswitch.conf passwd
    pki protocols services ssl"""
_OF_THE_SYSTEM = ("/sbin", *(f"/etc/{name}" for name in _OF_ETC.split()), "/dev/full")
_STREAMS = {name: f"/proc/self/fd/{number}" for number, name in enumerate(("stdin", "stdout", "stderr"))}
_LINKS = {"fd": "/proc/self/fd", **_STREAMS, "shm": "/tmp"}  # in /dev


def main() -> int:
    """Runs the command of the specification; returns the exit status."""
    given = json.loads(sys.argv[1])
    try:
        child = jail.start(lambda uid, report: _first_process(given, uid, report))
    except OSError as error:
        print(f"sandbox: {jail.reason_of(error)}", flush=True)
        return NO_SANDBOX
    return _watch(child, given)


def _give(workspace: str, uid: int):
    if os.geteuid() == 0 and uid != 0:
        for folder, _, files in os.walk(workspace):
            for path in (folder, *(os.path.join(folder, name) for name in files)):
                os.chown(path, uid, uid, follow_symlinks=False)


def _watch(child: int, given: dict) -> int:
    """Waits for process 1, or kills it at a limit; returns the exit status."""
    events = select.poll()
    for descriptor in (ended := os.pidfd_open(child), 0):
        events.register(descriptor, select.POLLIN | select.POLLHUP)
    memory, disk, reason = given["memory_mb"] << 20, given["disk_mb"] << 20, ""
    while not reason:
        ready = [descriptor for descriptor, _ in events.poll(_TICK_MS)]
        if ended in ready:
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) % 256
        if ready:
            reason = "it was stopped"
        elif jail.memory_of(child) > memory:
            reason = f"more than {given['memory_mb']} MiB of memory"
        elif _bytes_in(given["workspace"]) > disk:
            reason = f"more than {given['disk_mb']} MiB in its folder"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    print(f"sandbox: ended: {reason}", flush=True)
    return 128 + signal.SIGKILL


def _bytes_in(folder: str) -> int:
    total = 0
    for path, _, files in os.walk(folder):
        for name in files:
            try:
                total += os.lstat(os.path.join(path, name)).st_blocks * 512
            except OSError:
                pass  # it has been removed meanwhile
    return total


def _first_process(given: dict, uid: int, report: int):
    """Process 1 inside: starts relay and program, and ends with the program."""
    _give(given["workspace"], uid)
    jail.new_namespaces()
    shown = (*jail.SYSTEM, *_OF_THE_SYSTEM, *given["readable"], os.path.dirname(given["socket"]))
    jail.build_root(shown, uid, given["disk_mb"] << 20, 1 << 16, (given["workspace"],), proc=True)
    for name, target in _LINKS.items():
        os.symlink(target, f"/dev/{name}")
    jail.set_attributes(b"/", 1, recursive=False)
    listener = _listener(given["port"])
    os.chdir(given["workspace"])
    if os.fork() == 0:
        _become_safe(uid)
        os.close(report)
        _relay(listener, given["socket"])
    listener.close()
    if (program := os.fork()) == 0:
        _become_program(given, uid)
    _become_safe(uid)
    os.write(report, b"+")
    os.close(report)
    os._exit(_status_of(program))


def _listener(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    fcntl.ioctl(listener, _SET_INTERFACE_FLAGS, _UP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(MAX_CONNECTIONS)
    return listener


def _become_safe(uid: int):
    """Has this process run as the program's user, so that it can do no more, but out of the program's reach."""
    jail.become(uid)
    jail.die_with_parent()
    jail.filter_calls((_UNIX, _INET))
    jail.call("prctl", _SET_DUMPABLE, 0, 0, 0, 0)


def _status_of(program: int) -> int:
    """The program's exit status; reaps whatever else ends before."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == program:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def _become_program(given: dict, uid: int):
    try:
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        none = dict.fromkeys(("CORE", "MEMLOCK", "MSGQUEUE", "RTPRIO"), 0)
        jail.set_limits({"NPROC": given["processes"], "NOFILE": 4096, "FSIZE": given["disk_mb"] << 20, **none})
        jail.become(uid)
        jail.filter_calls((_UNIX, _INET, _INET6))
        os.execvp(given["command"][0], given["command"])
    except OSError as error:
        print(f"{given['command'][0]}: {error.strerror}", file=sys.stderr, flush=True)
    finally:
        os._exit(NOT_STARTED)


def _relay(listener: socket.socket, path: str):
    """Carries bytes between the program's connections and the endpoint's Unix socket. Never returns."""
    places = threading.Semaphore(MAX_CONNECTIONS)
    while True:
        inside, _ = listener.accept()
        if not places.acquire(blocking=False):
            inside.close()
            continue
        try:
            outside = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            outside.connect(path)
            threading.Thread(target=_carry_both, args=(inside, outside, places), daemon=True).start()
        except (OSError, RuntimeError):  # the episode has ended, or the program has used up its threads
            inside.close()
            places.release()


def _carry_both(inside: socket.socket, outside: socket.socket, places: threading.Semaphore):
    answers = threading.Thread(target=_carry, args=(outside, inside), daemon=True)
    try:
        answers.start()
        _carry(inside, outside)
        answers.join()
    finally:
        inside.close()
        outside.close()
        places.release()


def _carry(source: socket.socket, target: socket.socket):
    try:
        while chunk := source.recv(1 << 16):
            target.sendall(chunk)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        for each in (source, target):
            try:
                each.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # it is closed already


if __name__ == "__main__":
    os._exit(main())
