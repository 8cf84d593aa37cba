"""Programs in the sandbox of agents: what they may do, and what they try."""

import os
import sys
from pathlib import Path

from megarl.confine.agent_sandbox import ProgramSandbox
from megarl.environments.agents.program import ProgramEnvironment
from tests.helpers.envs import odd_programs
from tests.helpers.envs.odd_programs import MARK

PORT = "MEGARL_TEST_PORT"  # a variable: a port of the machine on which somebody listens


def _confined(source: str, reward, **limits) -> ProgramEnvironment:
    variables = {name: os.environ[name] for name in (MARK, PORT) if name in os.environ}
    sandbox = ProgramSandbox(**limits)
    return ProgramEnvironment([sys.executable, "-c", source, "{task}"], reward, variables=variables, sandbox=sandbox)


def asks() -> ProgramEnvironment:
    """As `odd_programs.asks`: OpenAI's client, and files that its reward sees."""
    made = odd_programs.asks()
    return ProgramEnvironment(made._command, made._reward, workspace=made._prepare, sandbox=True)


_EXPLORES = f"""
import os, socket
from pathlib import Path
found = []
for path in (os.environ[{MARK!r}], "/etc/shadow", "/sys/kernel", "/dev/sda"):
    found += [path] * os.path.exists(path)
for path in ("/here", "/usr/here", os.path.join(os.path.dirname(os.getcwd()), "here")):
    try:
        Path(path).write_text("x")
        found.append(path)
    except OSError:
        pass
for address in (("127.0.0.1", int(os.environ[{PORT!r}])), ("192.0.2.1", 80)):
    try:
        socket.create_connection(address, 1).close()
        found.append(address)
    except OSError:
        pass
for pid in os.listdir("/proc"):
    if pid.isdecimal() and pid != str(os.getpid()):
        try:
            os.kill(int(pid), 9)
            Path("/proc", pid, "mem").open("r+b").close()
            found.append(pid)
        except OSError:
            pass
if os.getuid() == 0:
    found.append("root")
Path("left").write_text("own folder")
Path("/tmp/left").write_text("own /tmp")
print(found)
"""


def explores() -> ProgramEnvironment:
    """It looks for what it should not see, and tries to reach it."""
    return _confined(_EXPLORES, lambda run: float(run.output == "[]\n" and (run.workspace / "left").exists()))


def _is_ended(run, reason: str) -> float:
    return float(run.status == -9 and run.output.rstrip().endswith(f"sandbox: ended: more than {reason}"))


def fills_its_folder() -> ProgramEnvironment:
    """It writes many small files."""
    source = "number = 0\nwhile True: number += 1; open(str(number), 'wb').write(b'0' * 2**16)"
    return _confined(source, lambda run: _is_ended(run, "8 MiB in its folder"), disk_mb=8)


def fills_the_memory() -> ProgramEnvironment:
    """It needs more and more."""
    source = "kept = []\nwhile True: kept.append(bytearray(b'1') * 2**22)"
    return _confined(source, lambda run: _is_ended(run, "200 MiB of memory"), memory_mb=200)


_FORKS = """
import os
count = 0
try:
    while True:
        if os.fork() == 0:
            os.setsid()
            os.read(os.pipe()[0], 1)
        count += 1
except BlockingIOError:
    print(count)
"""


def forks() -> ProgramEnvironment:
    """It starts as many processes as it can, which outlive it."""
    return _confined(_FORKS, lambda run: float(run.status == 0 and 2 <= int(run.output) < 16), processes=16)


_CONNECTS = """
import os, socket
from urllib.parse import urlsplit
from openai import OpenAI
address = urlsplit(os.environ["OPENAI_BASE_URL"])
opened = []
try:
    for _ in range(1000):
        opened.append(socket.create_connection((address.hostname, address.port), 1))
except OSError:
    pass
for each in opened:
    each.close()
print(OpenAI(max_retries=20).chat.completions.create(model="m", messages=[{"role": "user", "content": "1"}]).id != "")
"""


def connects() -> ProgramEnvironment:
    """It opens many connections, closes them, and asks."""
    return _confined(_CONNECTS, lambda run: float(run.output == "True\n"))


def linked() -> ProgramEnvironment:
    """A program that is a link in a folder which it may read."""
    folder = Path(os.environ[MARK]).parent / "tools"
    folder.mkdir(exist_ok=True)
    (folder / "program.py").write_text(f"#!{sys.executable}\nimport os\nprint(sorted(os.listdir({str(folder)!r})))\n")
    (folder / "program.py").chmod(0o755)
    if not (folder / "run").exists():
        (folder / "run").symlink_to("program.py")
    reward = lambda run: float(run.output == "['program.py', 'run']\n")  # noqa: E731
    return ProgramEnvironment([str(folder / "run")], reward, sandbox=ProgramSandbox(readable=[folder]))
