"""Which process an episode gets, and when one ends."""

import os
import subprocess
import sys

import pytest

from megarl.environments.processes import MAX_ALONE
from tests.helpers.tiers import long
from tests.helpers.waiting import SAFETY_SECONDS
from tests.helpers.worlds import wait_until


def _runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def processes(plays) -> list[int]:
    return [process.process.pid for process in plays.pool._processes]


def test_episodes_are_spread_over_the_workers_and_stay_where_they_are(play):
    plays = play("Echo", workers=2)
    plays.start(*range(4))
    assert sorted(len(process.episodes) for process in plays.pool._processes) == [2, 2]
    plays.pool.end(0)
    plays.start(4)
    assert sorted(len(process.episodes) for process in plays.pool._processes) == [2, 2]


@pytest.mark.parametrize("text, reason, replayed", [
    ("die", "its process ended with status 3", 2),  # the first time, each of those that waited may have done it
    long(("stick", "no answer within ", 1)),
])  # fmt: skip
def test_one_that_breaks_its_process_each_time_fails_alone(text, reason, replayed, play):
    """Its neighbours wait for an answer at that moment, and have no failure of their own."""
    plays = play("Neighbours", retries=1, timeout=2.0 if text == "stick" else SAFETY_SECONDS)
    plays.start(*range(12))
    for number in range(12):  # some have turns that must be played again
        assert plays.text(number, "first") == "0: first"
    texts = {number: text if number in (3, 7) else "meet" for number in range(12)}
    found = plays.step(texts)
    assert {number for number, event in found.items() if event.failure} == {3, 7}
    assert all(found[number].failure.startswith(reason) and found[number].replayed == replayed for number in (3, 7))
    assert all(found[n].observation.messages[0]["content"] == "1: meet" for n in found if n not in (3, 7))
    for number in (3, 7):
        plays.pool.end(number)
    healthy = [number for number in range(12) if number not in (3, 7)]
    assert all(event.failure is None for event in plays.step(dict.fromkeys(healthy, "last")).values())
    assert len(processes(plays)) <= 1 + MAX_ALONE
    for number in healthy:
        plays.pool.end(number)
    assert len(processes(plays)) == 1  # what was stuck, and what was alone, has ended


def test_what_environments_start_ends_with_the_pool_and_prints_to_stderr(play, capfd):
    plays = play("Child")
    plays.start(0)
    child = int(plays.text(0, "go"))
    os.kill(child, 0)
    plays.pool.close()
    assert wait_until(lambda: not _runs(child))
    out, err = capfd.readouterr()
    assert out == "" and "printed by an environment" in err


def test_workers_end_with_their_parent(tmp_path):
    """Also when it is killed."""
    script = (
        "from tests.helpers.envs.odd_environments import Plays\n"
        "plays = Plays('Echo'); plays.start(0)\n"
        "print(next(iter(plays.pool._processes)).process.pid, flush=True)\nimport time; time.sleep(1000)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        worker = int(parent.stdout.readline())
        assert _runs(worker)
        parent.kill()
    assert wait_until(lambda: not _runs(worker))
