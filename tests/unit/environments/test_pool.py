"""Environments in worker processes: many at once, and all ways in which they may break."""

import os
import signal
import subprocess
import sys

import pytest

from megarl.environments.journal import Journal
from megarl.environments.processes import MAX_ALONE
from megarl.environments.protocol import Task
from tests.helpers.odd_environments import HERE, MEETING, Plays, Wrong
from tests.helpers.tiers import long
from tests.helpers.waiting import SAFETY_SECONDS
from tests.helpers.worlds import wait_until


@pytest.fixture
def play(tmp_path, monkeypatch):
    monkeypatch.setenv("MEGARL_TEST_FOLDER", str(tmp_path))
    made = []

    def make(*args, **kwargs):
        made.append(Plays(*args, **kwargs))
        return made[-1]

    yield make
    for plays in made:
        plays.pool.close()


def processes(plays) -> list[int]:
    return [process.process.pid for process in plays.pool._processes]


@pytest.mark.parametrize("name", ["AsyncMeeting", "ThreadMeeting"])
def test_episodes_of_a_worker_wait_at_the_same_time(name, play):
    plays, numbers = play(name), range(MEETING)
    plays.start(*numbers)
    assert len(processes(plays)) == 1
    found = plays.step({number: f"text {number}" for number in numbers})
    assert [found[n].observation.messages[0]["content"] for n in numbers] == [f"0: text {n}" for n in numbers]
    assert all(event.turn.text == f"text {n}" for n, event in found.items())


def test_more_than_the_pipes_hold_goes_both_ways(play):
    """The pool sends all turns before it reads an answer."""
    plays, numbers = play("Long"), range(40)
    plays.start(*numbers)
    found = plays.step(dict.fromkeys(numbers, "y" * 100000))
    assert all(len(event.observation.messages[0]["content"]) == 500_000 for event in found.values())


def test_episodes_are_spread_over_the_workers_and_stay_where_they_are(play):
    plays = play("Echo", workers=2)
    plays.start(*range(4))
    assert sorted(len(process.episodes) for process in plays.pool._processes) == [2, 2]
    plays.pool.end(0)
    plays.start(4)
    assert sorted(len(process.episodes) for process in plays.pool._processes) == [2, 2]


def test_an_ended_episode_reports_nothing(play):
    plays = play("Echo")
    plays.start(0, 1)
    plays.pool.step(0, "a")
    plays.pool.end(0)
    assert set(plays.step({1: "b"})) == {1} and plays.pool.poll() == []


def test_an_episode_that_ends_before_its_answer_is_closed_after_it(play, tmp_path):
    """As one that a round has cut: its environment may still work."""
    plays = play("Watched")
    plays.start(0)
    plays.pool.step(0, "a")
    assert wait_until((tmp_path / "works").exists)
    plays.pool.end(0)
    plays.start(1)  # the worker has read that the other one is to be closed
    assert not (tmp_path / "closed").exists()
    (tmp_path / "go").touch()
    assert plays.text(1, "b") == "0: b"
    assert wait_until((tmp_path / "closed").exists) and wait_until((tmp_path / "closed").read_text)
    assert (tmp_path / "closed").read_text() == "works: False"


def test_a_worker_with_a_thread_that_hangs_is_retired_also_when_its_episode_has_ended(play):
    plays = play("Neighbours", timeout=1.0)
    plays.start(0)
    (before,) = processes(plays)
    plays.pool.step(0, "stick")
    plays.pool.end(0)
    assert wait_until(lambda: not plays.pool.poll() and not processes(plays))
    plays.start(1)
    assert plays.text(1, "a") == "0: a" and processes(plays) != [before]


@pytest.mark.parametrize("at", range(3))
def test_a_killed_worker_changes_nothing_but_the_count(at, play):
    undisturbed, plays = play("Echo"), play("Echo")
    for each in (undisturbed, plays):
        each.start(0, 1)
    for turn in range(3):
        texts = {0: f"a{turn}", 1: f"b{turn}"}
        expected = undisturbed.step(texts)
        if turn == at:
            os.kill(processes(plays)[0], signal.SIGKILL)
        found = plays.step(texts)
        for number in (0, 1):
            assert found[number].observation == expected[number].observation
            assert found[number].replayed == (turn == at)


def test_a_worker_that_blocks_its_loop_is_replaced(play, tmp_path):
    """Its own limit cannot end a call that stops the event loop; the pool's can."""
    plays = play("LoopBlocker")
    plays.start(0, 1)
    assert plays.text(0, "free") == "0: free"
    plays.pool.step(0, "block")
    assert wait_until((tmp_path / "blocked").exists)
    # The pool gives such a worker more time than its calls have, as it may only be busy: here that time is over.
    plays.pool._episodes[0].deadline = 0.0
    event = plays.collect([0])[0]
    assert event.failure is None and event.observation.messages[0]["content"] == "1: block"
    assert (event.replayed, event.late) == (1, 1)
    assert plays.text(1, "still here") == "0: still here"


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


def test_a_neighbour_that_cannot_be_replayed_stays_where_it_is(play):
    plays = play("Unreplayable", retries=0, timeout=2.0)
    plays.start(0, 1)
    assert plays.text(0, "a") == "0: a"
    assert plays.step({1: "stick"})[1].failure.startswith("no answer within")
    plays.pool.end(1)
    assert plays.text(0, "b") == "1: b"


def test_what_breaks_each_time_is_a_failure_and_others_go_on(play):
    plays = play("Wrong", retries=2)
    plays.start(0, 1)
    event = plays.step({0: "unknown"})[0]
    assert event.observation is None and event.failure.startswith("KeyError: 'unknown' (") and event.replayed == 2
    assert plays.text(1, "surrogate") == "a\ufffdb"


@pytest.mark.parametrize("name", sorted(set(Wrong.ANSWERS) - {"surrogate"}))
def test_wrong_observations_are_failures_that_say_why(name, play):
    plays = play("Wrong", retries=0)
    plays.start(0)
    said = {
        "none": "returned NoneType, not an Observation", "reward": "reward is nan, not a finite number",
        "role": "a message has the role 'assistant'; allowed are user, system, tool",
        "content": "content of a message is int, not text", "messages": "messages are str, not a list",
        "field": "a message is an object with role, content and perhaps tool_call_id and name",
        "parts": "a is 'b', not a finite number", "size": "the messages have 2,000,",
    }  # fmt: skip
    assert plays.step({0: name})[0].failure.startswith(f"ValueError: {HERE}:Wrong: {said[name]}")


def test_an_environment_that_only_says_that_it_can_be_replayed_is_found_out(play):
    plays = play("Unlike", retries=1)
    plays.start(0)
    assert plays.text(0, "a") == "1"
    event = plays.step({0: "b"})[0]
    assert event.failure == "RuntimeError: Unlike: turn 0 was answered differently when replayed"


def test_an_environment_that_cannot_be_replayed_is_tried_again_before_its_first_turn_alone(play):
    plays = play("Unrepeatable", retries=2)
    plays.start(0)
    assert plays.text(0, "a") == "0: a"
    event = plays.step({0: "break"})[0]
    assert event.failure.startswith("KeyError: 1 (") and event.replayed == 0


def test_what_environments_start_ends_with_the_pool_and_prints_to_stderr(play, capfd):
    plays = play("Child")
    plays.start(0)
    child = int(plays.text(0, "go"))
    os.kill(child, 0)
    plays.pool.close()
    assert wait_until(lambda: not _runs(child))
    out, err = capfd.readouterr()
    assert out == "" and "printed by an environment" in err


def _runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_workers_end_with_their_parent(tmp_path):
    """Also when it is killed."""
    script = (
        "from tests.helpers.odd_environments import Plays\n"
        "plays = Plays('Echo'); plays.start(0)\n"
        "print(next(iter(plays.pool._processes)).process.pid, flush=True)\nimport time; time.sleep(1000)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        worker = int(parent.stdout.readline())
        assert _runs(worker)
        parent.kill()
    assert wait_until(lambda: not _runs(worker))


def test_a_factory_that_fails_is_a_failure_of_the_episode(play):
    event = play("tests.helpers.odd_environments:_seen", retries=0).start(0)[0]
    assert event.failure.startswith("TypeError: _seen() missing 1 required positional argument")


def test_answers_of_the_journal_need_no_worker(play, tmp_path):
    first = play("Echo", Journal(tmp_path / "journal", 0, 1))
    first.start(0, key="1/2/3")
    first.text(0, "a")
    second = play("Echo", Journal(tmp_path / "journal", 0, 1))
    assert second.start(0, key="1/2/3")[0].from_journal
    assert second.text(0, "a") == "0: a" and processes(second) == []
    found = second.step({0: "b"})[0]  # not in the journal: a new environment goes on after the first turn
    assert not found.from_journal and found.observation.messages[0]["content"] == "1: b"


def test_other_texts_are_not_found_in_the_journal(play, tmp_path):
    first = play("Echo", Journal(tmp_path / "journal", 0, 1))
    first.start(0, key="k")
    first.text(0, "a")
    second = play("Echo", Journal(tmp_path / "journal", 0, 1))
    second.start(0, key="k")
    found = second.step({0: "c"})[0]
    assert not found.from_journal and found.observation.messages[0]["content"] == "0: c"


def test_the_module_of_an_environment_is_not_imported_here(play, monkeypatch):
    monkeypatch.delitem(sys.modules, "tests.helpers.sum_environments", raising=False)
    plays = play("tests.helpers.sum_environments:Sums")
    plays.pool.start(0, Task([]))
    plays.collect([0])
    assert "tests.helpers.sum_environments" not in sys.modules
