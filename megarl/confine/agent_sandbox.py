"""What a program in a sandbox may use, and its way to the endpoint of its episode (docs/agents.md)."""

import asyncio
import contextlib
import dataclasses
import functools
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megarl.confine import agent_jail
from megarl.confine.sandbox import probe_of_processes
from megarl.errors import UsageError

_PROBE_SECONDS = 60.0
_PROBE_PROCESSES = 8
# Tries from the inside what must not work; then the program may run.
_PROBE = f"""{probe_of_processes(_PROBE_PROCESSES)}
try:
    socket.create_connection(("192.0.2.1", 80), 1)
    sys.exit("the network cannot be shut off here")
except OSError:
    pass
try:
    open("/proc/1/mem", "r+b").close()
    sys.exit("the program can change the process that watches it")
except OSError:
    pass
if os.getuid() == 0 or os.access("/", os.W_OK) or os.path.exists("/etc/shadow") or os.path.exists("/sys/kernel"):
    sys.exit("the program can see or write more than it should here")
"""


async def open_door(folder: Path, port: int) -> tuple[Path, asyncio.Server]:
    """Opens a Unix socket in a new folder, from which bytes go to the endpoint and back: the network of the sandbox is
    not the machine's. `port`: of the endpoint on this machine. When the server is closed, connections end with their
    ends.
    """

    async def carry_both(inside: asyncio.StreamReader, answers: asyncio.StreamWriter):
        with contextlib.suppress(OSError):
            outside, requests = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(_carry(inside, requests), _carry(outside, answers))

    folder.mkdir()
    server = await asyncio.start_unix_server(carry_both, folder / "socket")
    for path, mode in ((folder, 0o711), (folder / "socket", 0o666)):
        path.chmod(mode)
    return folder / "socket", server


async def _carry(source: asyncio.StreamReader, target: asyncio.StreamWriter):
    try:
        while chunk := await source.read(1 << 16):
            target.write(chunk)
            await target.drain()
    finally:
        with contextlib.suppress(OSError):
            target.close()


@dataclasses.dataclass(frozen=True)
class ProgramSandbox:
    """What a program may use.

    `readable`: files and folders that it sees, read-only, besides those of the system, this Python with its packages,
    and the files that its command names. `memory_mb`: MiB that all of its processes have together. `disk_mb`: MiB of
    files in its folder, and in its /tmp. `processes`: processes and threads.
    """

    readable: Sequence[str | Path] = ()
    memory_mb: int = 4096
    disk_mb: int = 1024
    processes: int = 256

    def arguments(self, command: Sequence[str], workspace: Path, files: Sequence[Path], door: Path, port: int):
        """Arguments of Python for the script that confines a command, which also sees `files`; `door`: a socket."""
        named = [part for part in command if os.path.isabs(part) and os.path.isfile(part)]
        python = [sys.prefix, os.path.dirname(os.path.realpath(sys.executable))]
        given = {"command": list(command), "workspace": str(workspace), "socket": str(door), "port": port}
        given |= dataclasses.asdict(self)
        given["readable"] = _outermost([*python, *named, *map(str, (*files, *self.readable))])
        return [agent_jail.__file__, json.dumps(given)]


def _outermost(paths: Sequence[str]) -> list[str]:
    """The paths, and where links among them lead, without those that lie in others."""
    whole = {form for path in paths for form in (os.path.abspath(path), os.path.realpath(path))}
    return sorted(path for path in whole if not any(str(parent) in whole for parent in Path(path).parents))


@functools.cache
def check_sandbox():
    """UsageError unless a probe program finds every restriction in force; only success is cached."""
    with tempfile.TemporaryDirectory(prefix="megarl_agent_") as name:
        for folder in ("workspace", "door"):
            Path(name, folder).mkdir()
        command = [sys.executable, "-IS", "-c", _PROBE]
        limits = ProgramSandbox(processes=_PROBE_PROCESSES)
        arguments = limits.arguments(command, Path(name, "workspace"), [], Path(name, "door", "socket"), 80)
        stdin, other = socket.socketpair()  # its end would stop the program
        with stdin, other:
            streams: dict[str, Any] = dict(stdin=stdin.fileno(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            command, env = [sys.executable, "-I", "-S", *arguments], {"PATH": os.defpath}
            done = subprocess.run(command, check=False, timeout=_PROBE_SECONDS, env=env, text=True, **streams)
    if done.returncode:
        reason = done.stdout.strip().rpartition("\n")[2] or f"a first program ended with {done.returncode}"
        raise UsageError(f"this machine allows no sandbox for agents: {reason}")
