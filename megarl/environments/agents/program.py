"""An agent that is a program of its own: it finds the policy's address in its environment and runs unchanged.

In a sandbox (docs/agents.md) it may use what `ProgramSandbox` says, and reaches the endpoint of its episode alone.
"""

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from megarl.confine import keeper
from megarl.confine.agent_sandbox import ProgramSandbox, check_sandbox, open_door
from megarl.environments.agents.agent import Agent, AgentRun, observation_of
from megarl.environments.agents.session import Session
from megarl.environments.protocol import Observation, Task, called
from megarl.observe.files import json_bytes

MAX_OUTPUT = 1 << 16  # bytes that are kept of what a program prints, the last ones
_KEPT_VARIABLES = ("PATH", "LANG", "LC_ALL", "TZ", "PYTHONPATH", "PYTHONHASHSEED", "VIRTUAL_ENV")


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
        """`reward`: a number or a `Score` of an `AgentRun`; `workspace`: called with (task, path) before the start.

        Args:
            command: program and arguments. `{prompt}` in an argument stands for the text of the task's last message,
                `{task}`, like MEGARL_TASK, for the path of a JSON file with `messages`, `metadata`, `task` and `seed`.
            variables: further environment variables. The program gets OPENAI_BASE_URL, OPENAI_API_KEY,
                ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY, HOME (its folder), and of the run's variables only PATH, those of
                language and time zone, and Python's.
            max_file_mb: MiB that a file may have outside of a sandbox, which has limits of its own.
            sandbox: True, or what the program may use: it sees no files of the machine but those, and reaches nothing
                but the endpoint. UsageError on machines without one.
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

    async def run(self, task: Task, session: Session) -> Observation:
        self._folder = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="megarl_agent_"))
        workspace = self._folder / "workspace"
        workspace.mkdir()
        if self._prepare is not None:
            await called(self._prepare, task, workspace)
        status, output = await self._run(task, session, workspace)
        _, last = session.answered[-1] if session.answered else (None, None)
        truncated = session.refused > 0 or bool(last and last.is_budget)
        run = AgentRun(task, session.conversations(), truncated, status, output, workspace)
        return observation_of(await called(self._reward, run))

    async def _run(self, task: Task, session: Session, workspace: Path) -> tuple[int, str]:
        """(exit status, what it printed last)."""
        path = workspace.parent / "task.json"
        facts = {"messages": task.messages, "metadata": task.metadata, "task": task.task, "seed": task.seed}
        path.write_bytes(json_bytes(facts))
        command = [part.replace("{prompt}", task.prompt).replace("{task}", str(path)) for part in self._command]
        keeps = [keeper.__file__, str(self._max_file_bytes), *command]
        door = None
        if self._sandbox is not None:
            port = urlsplit(session.url).port
            assert port is not None  # an endpoint has one
            socket, door = await open_door(workspace.parent / "door", port)
            keeps = self._sandbox.arguments(command, workspace, [path], socket, port)
        streams: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        variables = self._environment(session, path, workspace)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", *keeps, **streams, cwd=workspace, env=variables, start_new_session=True
        )
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

    def _environment(self, session: Session, task: Path, workspace: Path) -> dict[str, str]:
        kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
        if self._sandbox is not None:  # what PATH names may be out of sight
            kept["PATH"] = os.pathsep.join((kept.get("PATH", os.defpath), os.path.dirname(sys.executable)))
        kept |= {"OPENAI_BASE_URL": session.url, "OPENAI_API_KEY": session.key}
        kept |= {"ANTHROPIC_BASE_URL": session.root, "ANTHROPIC_API_KEY": session.key}
        return {**kept, "MEGARL_TASK": str(task), "HOME": str(workspace), **self._variables}

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
