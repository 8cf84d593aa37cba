"""An agent that is a program of its own: it finds the policy's address in its environment and runs unchanged.

In a sandbox (docs/agents.md) it may use what `ProgramSandbox` says, and reaches the endpoint of its episode alone.
"""

import asyncio
import contextlib
import dataclasses
import functools
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from megarl.environments.agents import confined, keeper
from megarl.environments.agents.agent import Agent, AgentRun, observation_of
from megarl.environments.agents.session import Address, Session
from megarl.environments.protocol import Observation, Task, called
from megarl.errors import UsageError
from megarl.observe.files import json_bytes
from megarl.rewards.sandbox import probe_of_processes

MAX_OUTPUT = 1 << 16  # bytes that are kept of what a program prints, the last ones
_KEPT_VARIABLES = ("PATH", "LANG", "LC_ALL", "TZ", "PYTHONPATH", "PYTHONHASHSEED", "VIRTUAL_ENV")
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


@dataclasses.dataclass(frozen=True)
class ProgramSandbox:
    """What a program may use.

    Attributes:
        readable: files and folders that it sees, read-only, besides those of the system, this Python with its packages,
            and the files that its command names.
        memory_mb: MiB that all of its processes have together.
        disk_mb: MiB of files in its folder, and in its /tmp.
        processes: processes and threads.
    """

    readable: Sequence[str | Path] = ()
    memory_mb: int = 4096
    disk_mb: int = 1024
    processes: int = 256

    def arguments(
        self, command: Sequence[str], workspace: Path, files: Sequence[Path], door: Path, port: int
    ) -> list[str]:
        """Arguments of Python for the script that confines a command, which also sees `files`; `door`: a socket."""
        named = [part for part in command if os.path.isabs(part) and os.path.isfile(part)]
        python = [sys.prefix, os.path.dirname(os.path.realpath(sys.executable))]
        given = {
            "command": list(command),
            "workspace": str(workspace),
            "socket": str(door),
            "port": port,
            "readable": _outermost([*python, *named, *map(str, (*files, *self.readable))]),
            "memory_mb": self.memory_mb,
            "disk_mb": self.disk_mb,
            "processes": self.processes,
        }
        return [confined.__file__, json.dumps(given)]


class ProgramEnvironment(Agent):
    """One run of a command in a folder of its own, with the reward of what it has done."""

    def __init__(
        self,
        command: Sequence[str],
        reward: Callable[[AgentRun], Any],
        workspace: Callable[..., Any] | None = None,
        variables: Mapping[str, str] | None = None,
        max_file_mb: int = 256,
        sandbox: ProgramSandbox | bool = False,
    ):
        """
        Args:
            command: program and arguments. `{prompt}` in an argument stands for the text of the task's last message,
                `{task}` for the path of a JSON file with `messages`, `metadata`, `task` and `seed`. MEGARL_TASK is that
                path, too. The answer is not in it.
            reward: a number or a `Score` of an `AgentRun`; plain or async.
            workspace: prepares the folder: called with (task, path) before the program starts; plain or async.
            variables: further environment variables. The program gets OPENAI_BASE_URL, OPENAI_API_KEY,
                ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY, HOME (its folder), and of the run's variables only PATH, those of
                language and time zone, and Python's.
            max_file_mb: MiB that a file may have outside of a sandbox, which has limits of its own.
            sandbox: True, or what the program may use: it sees no files of the machine but those, and reaches nothing
                but the endpoint. False: it runs as the run does.

        Raises:
            FileNotFoundError: there is no such program.
            UsageError: this machine allows no sandbox.
        """
        if isinstance(command, str) or not command:
            raise TypeError("command is a list of the program and its arguments")
        self._command, self._reward, self._prepare = list(command), reward, workspace
        self._variables, self._max_file_bytes = dict(variables or {}), max_file_mb << 20
        if shutil.which(self._command[0]) is None:
            raise FileNotFoundError(f"there is no program {self._command[0]}")
        self._folder: Path | None = None
        self._sandbox = ProgramSandbox() if sandbox is True else sandbox or None
        if self._sandbox is not None:
            check_sandbox()

    async def run(self, task: Task, session: Session, address: Address) -> Observation:
        self._folder = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="megarl_agent_"))
        workspace = self._folder / "workspace"
        workspace.mkdir()
        if self._prepare is not None:
            await called(self._prepare, task, workspace)
        status, output = await self._run(task, session, address, workspace)
        _, last = session.answered[-1] if session.answered else (None, None)
        truncated = session.refused > 0 or bool(last and last.is_budget)
        run = AgentRun(task, session.conversations(), truncated, status, output, workspace)
        return observation_of(await called(self._reward, run))

    async def _run(self, task: Task, session: Session, address: Address, workspace: Path) -> tuple[int, str]:
        """(exit status, what it printed last)."""
        path = workspace.parent / "task.json"
        facts = {"messages": task.messages, "metadata": task.metadata, "task": task.task, "seed": task.seed}
        path.write_bytes(json_bytes(facts))
        command = [part.replace("{prompt}", task.prompt).replace("{task}", str(path)) for part in self._command]
        keeps = [keeper.__file__, str(self._max_file_bytes), *command]
        door = None
        if self._sandbox is not None:
            door = await Door.open(workspace.parent / "door", address)
            keeps = self._sandbox.arguments(command, workspace, [path], door.path, door.port)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", *keeps,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            cwd=workspace, env=self._environment(address, path, workspace), start_new_session=True,
        )  # fmt: skip
        assert process.stdin is not None  # it is a pipe
        output = asyncio.create_task(_last_bytes(process.stdout))
        ended, spent = asyncio.create_task(process.wait()), asyncio.create_task(session.spent.wait())
        try:
            await asyncio.wait((ended, spent), return_when=asyncio.FIRST_COMPLETED)
        finally:
            spent.cancel()
            process.stdin.close()  # the keeper kills what is left
            status = await asyncio.shield(ended)
            if door is not None:
                door.close()
        printed = (await output).decode("utf-8", "replace")
        return (128 - status if status > 128 else status), printed

    def _environment(self, address: Address, task: Path, workspace: Path) -> dict[str, str]:
        kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
        if self._sandbox is not None:  # what PATH names may be out of sight
            kept["PATH"] = os.pathsep.join((kept.get("PATH", os.defpath), os.path.dirname(sys.executable)))
        return kept | {
            "OPENAI_BASE_URL": address.url, "OPENAI_API_KEY": address.key, "ANTHROPIC_BASE_URL": address.root,
            "ANTHROPIC_API_KEY": address.key, "MEGARL_TASK": str(task), "HOME": str(workspace), **self._variables,
        }  # fmt: skip

    async def close(self):
        if self._folder is not None:
            await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)


async def _last_bytes(stream: asyncio.StreamReader | None) -> bytes:
    assert stream is not None  # it is a pipe
    kept = b""
    with contextlib.suppress(ConnectionError):
        while chunk := await stream.read(MAX_OUTPUT):
            kept = (kept + chunk)[-MAX_OUTPUT:]
    return kept


# -- the sandbox -------------------------------------------------------------------------------------------------------


class Door:
    """A Unix socket from which bytes go to the endpoint and back: the network of the sandbox is not the machine's."""

    def __init__(self, server: asyncio.Server, path: Path, port: int):
        self._server, self.path, self.port = server, path, port

    @classmethod
    async def open(cls, folder: Path, address: Address) -> "Door":
        """Opens a socket in a new folder."""
        port = urlsplit(address.url).port
        assert port is not None  # an endpoint has one

        async def carry_both(inside: asyncio.StreamReader, answers: asyncio.StreamWriter):
            with contextlib.suppress(OSError):
                outside, requests = await asyncio.open_connection("127.0.0.1", port)
                await asyncio.gather(_carry(inside, requests), _carry(outside, answers))

        folder.mkdir()
        server = await asyncio.start_unix_server(carry_both, folder / "socket")
        for path, mode in ((folder, 0o711), (folder / "socket", 0o666)):
            path.chmod(mode)
        return cls(server, folder / "socket", port)

    def close(self):
        """Closes it; connections end with their ends."""
        self._server.close()


async def _carry(source: asyncio.StreamReader, target: asyncio.StreamWriter):
    """Carries bytes one way, to their end."""
    try:
        while chunk := await source.read(1 << 16):
            target.write(chunk)
            await target.drain()
    finally:
        with contextlib.suppress(OSError):
            target.close()


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
            done = subprocess.run(
                [sys.executable, "-I", "-S", *arguments], check=False, stdin=stdin.fileno(), stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, text=True, timeout=_PROBE_SECONDS, env={"PATH": os.defpath},
            )  # fmt: skip
    if done.returncode:
        reason = done.stdout.strip().rpartition("\n")[2] or f"a first program ended with {done.returncode}"
        raise UsageError(f"this machine allows no sandbox for agents: {reason}")
