"""Programs as agents: one that asks, and ones that do what none should."""

import os
import sys
from pathlib import Path

from megarl.environments.agents.program import ProgramEnvironment

HERE = "tests.helpers.envs.odd_programs"
MARK = "MEGARL_TEST_MARK"  # a variable by which a test finds the processes of its agents


def marked(mark: str) -> list[int]:
    """The processes that have the mark in their environment."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                variables = (folder / "environ").read_bytes()
                command = (folder / "cmdline").read_bytes()
            except OSError:
                continue
            if f"{MARK}={mark}".encode() in variables and b"megarl.environments.worker" not in command:
                found.append(int(folder.name))
    return found


def _program(source: str, reward=lambda run: 1.0, **fields) -> ProgramEnvironment:
    return ProgramEnvironment([sys.executable, "-c", source, "{prompt}", "{task}"], reward, **fields)


ASKS = (
    "import os, sys, json; from openai import OpenAI; task = json.load(open(sys.argv[2]));"
    "assert sys.argv[1] == '12+30=' and 'answer' not in task;"
    "print(OpenAI().chat.completions.create(model='m', messages=task['messages']).choices[0].message.content);"
)


def asks() -> ProgramEnvironment:
    """A program with files of its own; its reward sees what it has left."""

    def prepare(task, folder: Path):
        (folder / "given").write_text(task.answer)

    def reward(run) -> float:
        assert run.status == 0 and run.output == "42\n", run
        assert run.answer == "42" and [message["role"] for message in run.conversations[0]] == ["user", "assistant"]
        return float((run.workspace / "left").read_text())

    copies = "open('left', 'w').write(open('given').read())"
    return _program(ASKS + copies, reward, workspace=prepare)


def ends_at_once() -> ProgramEnvironment:
    """It asks nothing."""
    return _program("raise SystemExit(3)", lambda run: float(run.status == 3 and not run.conversations))


def is_killed() -> ProgramEnvironment:
    """It ends by a signal."""
    return _program("import os; os.kill(os.getpid(), 9)", lambda run: float(run.status == -9))


def leaves_daemons() -> ProgramEnvironment:
    """It starts processes that outlive it, in sessions of their own."""
    source = (
        "import os, time\n"
        "for _ in range(3):\n"
        "    if os.fork() == 0:\n"
        "        os.setsid()\n"
        "        if os.fork() == 0:\n"
        "            time.sleep(600)\n"
        "        os._exit(0)\n"
    )
    return _program(source, variables={MARK: os.environ[MARK]})


def hangs_with_daemons() -> ProgramEnvironment:
    """It starts a process and works for ever."""
    source = "import os, time\nif os.fork() == 0: os.setsid()\ntime.sleep(600)"
    return _program(source, variables={MARK: os.environ[MARK]})


def fills_the_disk() -> ProgramEnvironment:
    """It writes a file without end."""
    source = "file = open('huge', 'wb')\nwhile True: file.write(b'0' * 2**20)"
    return _program(source, lambda run: float(run.status != 0 and (run.workspace / "huge").stat().st_size <= 2**20),
                    max_file_mb=1)  # fmt: skip


def prints_much() -> ProgramEnvironment:
    """It prints 20 MB."""
    return _program("print('0' * 20_000_000 + 'end')", lambda run: float(
        run.status == 0 and run.output.endswith("end\n") and len(run.output) <= 2**16))  # fmt: skip


def missing() -> ProgramEnvironment:
    return ProgramEnvironment(["no-such-program"], lambda run: 1.0)
