"""The sandbox: what a program can see and do, and that it leaves nothing outside."""

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megarl.confine.sandbox import Limits, run
from tests.helpers.processes import descendants
from tests.helpers.worlds import wait_until

pytestmark = [pytest.mark.sandbox, pytest.mark.usefixtures("nothing_outside_changes")]
ROOT = Path(__file__).parents[3]
EASY = Limits(60.0, 256, 1 << 16)  # for programs that end by themselves


def test_input_output_and_exit_status():
    echo = run("import sys\nprint(sys.stdin.read())\nprint('möglich', file=sys.stderr)", "zwölf\n🦊", EASY)
    assert (echo.status, echo.stdout, echo.stderr) == ("ok", "zwölf\n🦊\n", "möglich\n")
    assert run("if __name__ == '__main__':\n    exit()", limits=EASY).status == "ok"
    assert run("import sys; sys.exit(3)", limits=EASY).status == "error"
    assert run("import os; os.kill(0, 9); os.abort()", limits=EASY).status == "error"
    broken = run("print(", limits=EASY)
    assert broken.status == "error" and "SyntaxError" in broken.stderr
    assert run("raise MemoryError", limits=EASY).status == "memory"


def test_programs_run_side_by_side():
    with ThreadPoolExecutor(4) as pool:
        outcomes = pool.map(lambda number: run(f"print({number} + int(input()))", "100", EASY), range(4))
    assert [outcome.stdout for outcome in outcomes] == ["100\n", "101\n", "102\n", "103\n"]


def runs(pid):
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()  # An orphan waits for init as a zombie.
    except OSError:
        return False


def test_the_sandbox_dies_with_its_caller():
    script = "from megarl.confine.sandbox import Limits, run\n"
    script += "run('import os, time\\nos.fork()\\ntime.sleep(9999)', limits=Limits(9999.0))"
    caller = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT)
    seen = [[], []]

    def is_up():
        seen[:] = seen[1], descendants(caller.pid)
        return len(seen[0]) == 3 and seen[0] == seen[1]

    # The watcher, process 1 and its child, for two looks: not the many of the probe that comes first.
    assert wait_until(is_up)
    caller.kill()
    caller.wait()
    assert wait_until(lambda: not any(map(runs, seen[1])))


def test_an_alarm_in_the_caller_leaves_nothing():
    class Alarm(BaseException):
        pass

    def ring(*_):
        raise Alarm

    before = set(descendants(os.getpid()))

    def ring_when_it_runs():
        """Three processes are there only once the program is handed over: the watcher, process 1 and its child."""
        if wait_until(lambda: len(set(descendants(os.getpid())) - before) == 3):
            os.kill(os.getpid(), signal.SIGALRM)

    earlier = signal.signal(signal.SIGALRM, ring)
    watcher = threading.Thread(target=ring_when_it_runs)
    try:
        watcher.start()
        with pytest.raises(Alarm):
            run("import os, time\nos.fork()\ntime.sleep(9999)", limits=EASY)
    finally:
        watcher.join()
        signal.signal(signal.SIGALRM, earlier)


def test_no_program_runs_where_there_can_be_no_sandbox():
    """Behind its own filter of calls the jail cannot be built: no second way is tried."""
    script = (
        "from megarl.confine import jail, sandbox\njail.filter_calls()\nprint(sandbox.available())\n"
        "try:\n    sandbox.run('print(1)')\nexcept sandbox.SandboxError as error:\n    print('refused:', error)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    reason = "unshare: Operation not permitted"
    assert done.stdout == f"{reason}\nrefused: {reason}\n"
