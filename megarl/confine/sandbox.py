"""Runs an untrusted Python program within limits, isolated from the machine (docs/rewards.md)."""

import functools
import os
import selectors
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import IO, Any, cast

from megarl import child_process
from megarl.cluster import cpu_cores
from megarl.confine import jail

# Extra time that a loaded machine may need to start or end a run.
_GRACE_SECONDS = 10.0
_STATUSES = {jail.OK: "ok", jail.ERROR: "error", jail.TIMEOUT: "timeout", jail.MEMORY: "memory"}


class SandboxError(RuntimeError):
    """This machine allows no sandbox; the message says what failed. Nothing was run."""


@dataclass(frozen=True)
class Limits:
    """Limits of one program: wall-clock seconds, which also limit each process's CPU time (rounded up); MiB of address
    space per process and of memory in total; bytes of standard output and error together.
    """

    seconds: float = 30.0
    memory_mb: int = 1024
    output_bytes: int = 1 << 20


@dataclass(frozen=True)
class Outcome:
    """How a program ended, and its output up to the limit, with U+FFFD for invalid UTF-8.

    `status`: `ok` (exit status 0), `error` (another status, or a crash), or the limit that ended it: `timeout`,
    `memory` (also an uncaught MemoryError), `output`.
    """

    status: str
    stdout: str
    stderr: str


def run(source: str, stdin: str = "", limits: Limits = Limits()) -> Outcome:
    """Run `source` as a Python program with standard input `stdin`; no process of it is left afterwards. It has the
    standard library, an empty temporary folder, and no network. Raises SandboxError if this machine allows no sandbox:
    nothing ever runs outside it. Thread-safe.
    """
    _probe()
    return _run(source, stdin, limits)


def available() -> str | None:
    """None if this machine allows a sandbox, else the reason; takes about 0.1 s, once."""
    try:
        _probe()
    except (SandboxError, OSError) as error:
        return str(error)
    return None


@functools.cache
def _probe():
    """SandboxError unless a probe program finds every restriction in force; only success is cached."""
    outcome = _run(_PROBE, "", Limits(seconds=20.0, memory_mb=256))
    if outcome.status != "ok":
        last_line = outcome.stderr.strip().rpartition("\n")[2]
        raise SandboxError(last_line or f"a first program ended with {outcome.status}")


def _run(source: str, stdin: str, limits: Limits) -> Outcome:
    contents = [text.encode("utf-8", "replace") for text in (source, stdin)]
    numbers = [limits.seconds, limits.memory_mb << 20, os.getpid(), *map(len, contents)]
    command = [os.path.realpath(sys.executable), "-I", "-S", jail.__file__, *map(str, numbers)]
    with child_process.blocked(), cpu_cores.unbound():
        pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        process = subprocess.Popen(command, bufsize=0, env={}, cwd="/", start_new_session=True, **pipes)
    try:
        _write_input(process, b"".join(contents))
        output, overflow, late = _read(process, limits)
    finally:
        _end(process)
    stdout, stderr = (output[stream].decode("utf-8", "replace") for stream in (process.stdout, process.stderr))
    status = _STATUSES.get(process.returncode)
    if overflow:
        status = "output"
    elif late:
        status = "timeout"
    elif status is None:
        raise SandboxError(stderr.strip().rpartition("\n")[2] or f"the sandbox ended with status {process.returncode}")
    elif status == "error" and stderr.rstrip().rpartition("\n")[2].startswith("MemoryError"):
        status = "memory"
    return Outcome(status, stdout, stderr)


def probe_of_processes(limit: int) -> str:
    """Source that tries from the inside to have more processes than allowed; it has imported os, socket and sys."""
    return f"""
import os, socket, sys
children = 0
try:
    while children <= {limit}:
        if not os.fork():
            os.read(os.pipe()[0], 1)
        children += 1
except BlockingIOError:
    pass
if children > {limit}:
    sys.exit("the number of processes cannot be limited here (RLIMIT_NPROC does not hold for this user)")
"""


# Tries from the inside what must not work.
_PROBE = f"""{probe_of_processes(jail.PROCESSES)}
for family in (socket.AF_INET, socket.AF_INET6):
    try:
        socket.socket(family)
    except PermissionError:
        continue
    sys.exit("the network cannot be shut off here")
if os.getpid() != 1 or os.getuid() == 0 or os.listdir() or os.access("/", os.W_OK) or os.path.exists("/proc"):
    sys.exit("the program can see or write more than it should here")
"""


def _write_input(process: subprocess.Popen, content: bytes) -> None:
    """Write program and input. The script reads all of it before it starts the program, so this cannot deadlock."""
    rest = memoryview(content)
    try:
        while rest:
            rest = rest[process.stdin.write(rest) :]
    except BrokenPipeError:
        pass  # it has failed; its exit status says how


def _read(process: subprocess.Popen, limits: Limits) -> tuple[dict, bool, bool]:
    """(output of both streams, whether it exceeded the limit, whether they stayed open past the grace period)."""
    output = {process.stdout: bytearray(), process.stderr: bytearray()}
    left = limits.output_bytes
    deadline = time.monotonic() + limits.seconds + _GRACE_SECONDS
    with selectors.DefaultSelector() as selector:
        for stream in output:
            selector.register(stream, selectors.EVENT_READ)
        while selector.get_map():
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                return output, False, True
            for key, _ in ready:
                chunk = os.read(key.fd, 1 << 16)
                output[cast(IO[bytes], key.fileobj)] += chunk[:left]
                if len(chunk) > left:
                    return output, True, False
                left -= len(chunk)
                if not chunk:
                    selector.unregister(key.fileobj)
    return output, False, False


def _end(process: subprocess.Popen) -> None:
    process.stdin.close()
    try:
        process.wait(_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()
    process.stderr.close()
