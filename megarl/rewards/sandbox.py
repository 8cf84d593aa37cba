"""Runs a Python program that nobody trusts, within limits and without touching anything outside (docs/sandbox.md)."""

import functools
import os
import selectors
import subprocess
import sys
import time
from dataclasses import dataclass

from megarl.rewards import jail

# What a loaded machine may need to start or to end a run, on top of the limit of time.
_GRACE_SECONDS = 10.0
_STATUSES = {jail.OK: "ok", jail.ERROR: "error", jail.TIMEOUT: "timeout", jail.MEMORY: "memory"}


class SandboxError(RuntimeError):
    """This machine does not let a program be locked up; the message says what was refused. Nothing was run."""


@dataclass(frozen=True)
class Limits:
    """What one program may use: wall-clock seconds, and as many of CPU time in each process (rounded up); mebibytes of
    address space in each process and of memory in all together; bytes of standard output and error together.
    """

    seconds: float = 30.0
    memory_mb: int = 1024
    output_bytes: int = 1 << 20


@dataclass(frozen=True)
class Outcome:
    """How a program ended, and what it wrote, at most the limit's bytes, U+FFFD for what is not UTF-8.

    `status`: `ok` (exit status 0), `error` (another one, or a crash), or the limit that it was ended by: `timeout`,
    `memory` (also where an uncaught MemoryError ended it), `output`.
    """

    status: str
    stdout: str
    stderr: str


def run(source: str, stdin: str = "", limits: Limits = Limits()) -> Outcome:
    """Run `source` as a Python program whose standard input is `stdin`; no process of it is left afterwards.

    It finds the standard library, an empty folder that vanishes with it, and no network. Raises SandboxError where
    that cannot be had: nothing ever runs outside the sandbox. May be called by several threads at once.
    """
    _probe()
    return _run(source, stdin, limits)


def available() -> str | None:
    """None if programs can be locked up here, else the reason in a few words; takes about 0.1 s, once."""
    try:
        _probe()
    except (SandboxError, OSError) as error:
        return str(error)
    return None


@functools.cache
def _probe():
    """SandboxError unless a first program finds every wall in its place; only success is remembered."""
    outcome = _run(_PROBE, "", Limits(seconds=20.0, memory_mb=256))
    if outcome.status != "ok":
        last_line = outcome.stderr.strip().rpartition("\n")[2]
        raise SandboxError(last_line or f"a first program ended with {outcome.status}")


def _run(source: str, stdin: str, limits: Limits) -> Outcome:
    given = [text.encode("utf-8", "replace") for text in (source, stdin)]
    numbers = [limits.seconds, limits.memory_mb << 20, os.getpid(), *map(len, given)]
    command = [os.path.realpath(sys.executable), "-I", "-S", jail.__file__, *map(str, numbers)]
    process = subprocess.Popen(
        command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={}, cwd="/",
        start_new_session=True,
    )  # fmt: skip
    try:
        _give(process, b"".join(given))
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


# What must not work, tried from the inside.
_PROBE = f"""
import os, socket, sys
children = 0
try:
    while children <= {jail.PROCESSES}:
        if not os.fork():
            os.read(os.pipe()[0], 1)
        children += 1
except BlockingIOError:
    pass
if children > {jail.PROCESSES}:
    sys.exit("the number of processes cannot be limited here (RLIMIT_NPROC does not hold for this user)")
for family in (socket.AF_INET, socket.AF_INET6):
    try:
        socket.socket(family)
    except PermissionError:
        continue
    sys.exit("the network cannot be shut off here")
if os.getpid() != 1 or os.getuid() == 0 or os.listdir() or os.access("/", os.W_OK) or os.path.exists("/proc"):
    sys.exit("the program can see or write more than it should here")
"""


def _give(process: subprocess.Popen, content: bytes) -> None:
    """Write program and input. It is all read before anything else happens, so this cannot wait for output."""
    rest = memoryview(content)
    try:
        while rest:
            rest = rest[process.stdin.write(rest) :]
    except BrokenPipeError:
        pass  # It has failed, and its exit status tells.


def _read(process: subprocess.Popen, limits: Limits) -> tuple[dict, bool, bool]:
    """What both streams say, whether that is more than the limit, whether they stay open far beyond the time limit."""
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
                output[key.fileobj] += chunk[:left]
                if len(chunk) > left:
                    return output, True, False
                left -= len(chunk)
                if not chunk:
                    selector.unregister(key.fileobj)
    return output, False, False


def _end(process: subprocess.Popen) -> None:
    """Stop whatever still runs, and wait until nothing of it is left."""
    process.stdin.close()
    try:
        process.wait(_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()
    process.stderr.close()
