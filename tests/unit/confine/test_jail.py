"""What a program in the sandbox can see and do, and the limits that end it."""

import json
import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.confine import jail, sandbox
from megarl.confine.sandbox import Limits, run
from tests.helpers.processes import descendants
from tests.helpers.tiers import long
from tests.helpers.worlds import wait_until

pytestmark = [pytest.mark.sandbox, pytest.mark.usefixtures("nothing_outside_changes")]
EASY = Limits(60.0, 256, 1 << 16)  # for programs that end by themselves
TIGHT = Limits(0.4, 96, 1 << 16)
LOOK = """
import ctypes, json, os, resource, socket
def attempt(function, *arguments):
    try:
        function(*arguments)
    except OSError as error:
        return error.errno
    return 0
def call(name, *arguments):
    return ctypes.get_errno() if getattr(libc, name)(*arguments) < 0 else 0
libc = ctypes.CDLL(None, use_errno=True)
seen = {
    "environment": sorted(os.environ), "host": os.uname().nodename, "here": os.listdir(), "root": os.listdir("/"),
    "files": [number for number in range(jail_files) if not attempt(os.fstat, number)],
    "ids": [os.getpid(), os.getppid(), 0 in os.getresuid()],
    "write": [attempt(open, path, "w") for path in ("/usr/bin/env", "/new", os.__file__)],
    "limits": [resource.getrlimit(limit) for limit in (resource.RLIMIT_CPU, resource.RLIMIT_AS, resource.RLIMIT_CORE)],
    "secret": os.path.exists(secret),
    "sockets": [attempt(socket.socket, family) for family in (socket.AF_INET, socket.AF_INET6, 16, 17, 40)],
    "calls": [
        call("unshare", 0x10000000), call("setns", 0, 0), call("syscall", clone, 0x10000000 | 17, 0, 0, 0, 0),
        call("shmget", 0, 4096, 0o1600), call("memfd_create", b"a", 0), call("ptrace", 0, 0, 0, 0),
        call("prctl", 1, 0, 0, 0, 0), call("mount", b"none", b"/tmp", b"tmpfs", 0, None),
    ],
}
for path in "/tmp/" + marker, os.path.expanduser("~/" + marker):
    open(path, "w").close()
seen["mine"] = os.listdir()
print(json.dumps(seen))
"""


def test_a_program_sees_and_reaches_nothing_outside(monkeypatch, tmp_path):
    for name in "RANK", "MASTER_ADDR", "ACCESS_TOKEN":
        monkeypatch.setenv(name, "secret")
    secret, marker = tmp_path / "secret", f"marker-{os.getpid()}-{time.time_ns()}"
    secret.write_text("secret")
    with open(secret) as leak:
        os.set_inheritable(leak.fileno(), True)
        clone = {"x86_64": 56, "aarch64": 220}[os.uname().machine]
        names = {"secret": str(secret), "marker": marker, "jail_files": jail.OPEN_FILES, "clone": clone}
        outcome = run("".join(f"{name} = {value!r}\n" for name, value in names.items()) + LOOK, limits=EASY)
    assert outcome.status == "ok", outcome.stderr
    seen = json.loads(outcome.stdout)
    assert seen["environment"] == ["HOME", "LANG", "MALLOC_ARENA_MAX", "PATH", "PYTHONHASHSEED"]
    assert not set(seen["root"]) & {"proc", "sys", "home", "outside", "content", "work"} and seen["here"] == []
    assert seen["files"] == [0, 1, 2] and seen["ids"] == [1, 0, False] and seen["host"] == "sandbox"
    assert seen["secret"] is False and seen["sockets"] == [1] * 5 and seen["calls"] == [1] * 8
    assert seen["limits"] == [[60, 60], [256 << 20] * 2, [0, 0]]
    assert set(seen["write"]) <= {13, 30} and seen["mine"] == [marker]
    assert not os.path.exists(f"/tmp/{marker}") and not os.path.exists(os.path.expanduser(f"~/{marker}"))


@pytest.mark.parametrize("status, source", [
    ("timeout", "while True: pass"),
    ("timeout", "import os, time\nos.close(1); os.close(2)\ntime.sleep(9999)"),
    ("timeout", "import os, signal\nif os.fork():\n    os.wait()\nos.kill(os.getpid(), signal.SIGSTOP)"),
    ("output", "import sys\nfor _ in range(1024): sys.stdout.write('x' * (1 << 20))"),
    long(("output", "import sys\nwhile True: sys.stderr.write('x' * 1000)")),
    ("memory", "x = []\nwhile True: x.append(b'x' * (1 << 20))"),
    ("error", "open('huge', 'wb').truncate(1 << 40)"),
    ("error", "for i in range(99):\n    open(str(i), 'wb').write(bytes(1 << 20))"),
    ("error", "import sys\nsys.setrecursionlimit(10**9)\nx = []\nfor _ in range(10**5): x = [x]\nrepr(x)"),
    long(("error", "import os\nwhile True: os.pipe()")),
    ("ok", "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP); os.kill(os.getppid(), signal.SIGKILL)"),
    ("ok", "import subprocess\nsubprocess.Popen(['sleep', 'infinity'], start_new_session=True)"),
    ("ok", "import os, time\nif os.fork() == 0:\n    os.setsid()\n    os.fork()\n    time.sleep(9999)"),
])  # fmt: skip
def test_limits(status, source):
    # What never ends by itself would give "timeout" here if it were not the limit in question that ended it.
    outcome = run(source, limits=TIGHT if status == "timeout" else replace(EASY, memory_mb=96))
    assert outcome.status == status, outcome
    assert (len(outcome.stdout + outcome.stderr) == 1 << 16) == (status == "output")


def watched(source, limits):
    """The outcome, and the most processes and MiB that the sandbox was seen with from outside."""
    before, peaks, done = set(descendants(os.getpid())), [0, 0], threading.Event()

    def watch():
        while not done.wait(0.01):
            # Without the watcher of the jail, which until its program begins has the memory of this process.
            inside = {each for pid in set(descendants(os.getpid())) - before for each in descendants(pid)}
            peaks[0] = max(peaks[0], len(inside))
            peaks[1] = max(peaks[1], sum(map(anonymous_kib, inside)) >> 10)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        return run(source, limits=limits), *peaks
    finally:
        done.set()
        watcher.join()


def anonymous_kib(pid):
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem")))


@pytest.mark.parametrize("status, refused, limits", [
    ("timeout", "pass", Limits(0.5, 512, 1 << 16)),
    ("output", "os.write(1, b'no more\\n')", Limits(60.0, 512, 1 << 16)),
])  # fmt: skip
def test_a_fork_bomb_stays_small(status, refused, limits, monkeypatch):
    """If the output limit ends it, no output is read before many processes of the bomb have been seen."""
    bomb = f"import os\nos.fork()\nwhile True:\n    try:\n        os.fork(); os.setsid()\n    except OSError: {refused}"
    read, before = sandbox._read, set(descendants(os.getpid()))

    def read_when_large(*args):
        assert wait_until(lambda: len(set(descendants(os.getpid())) - before) - 1 > 8)
        return read(*args)

    if status == "output":
        monkeypatch.setattr(sandbox, "_read", read_when_large)
    outcome, processes, _ = watched(bomb, limits)
    assert outcome.status == status and processes <= jail.PROCESSES


CHILDREN = """
else:
    print(number + 1, "children", flush=True)
    os.write(begin, bytes(20))
    time.sleep(9999)
os.read(hold, 1)
x = {store}
for place in range(0, 12 << 20, 4096): x[place] = 1
time.sleep(9999)
"""


@pytest.mark.parametrize("store", ["bytearray(12 << 20)", "mmap.mmap(-1, 12 << 20)"])
def test_many_children_share_one_limit_of_memory(store):
    """Each of 20 takes 12 MiB and keeps them, so it is their sum that is over the limit, and less than twice as much.

    They begin when all of them are there: how fast they are and how often the watcher looks do not count.
    """
    source = "import mmap, os, time\nhold, begin = os.pipe()\nfor number in range(20):\n    if os.fork() == 0: break"
    source += CHILDREN.format(store=store)
    outcome, _, mebibytes = watched(source, replace(EASY, memory_mb=200))
    assert outcome.status == "memory" and outcome.stdout == "20 children\n"
    assert mebibytes < 400  # each of them alone may have 200
