"""Environments in worker processes: many at once, all ways in which they may break, and when a process ends."""

import os
import signal
import subprocess
import sys

import pytest

from megarl.data.images.book import Images
from megarl.data.images.names import PATTERN
from megarl.environments.journal import Journal
from megarl.environments.pool import MAX_ALONE
from megarl.environments.protocol import Task
from tests.helpers.texts.picture_prompts import processor_of, write_folder
from tests.helpers.tiers import long
from tests.helpers.waiting import SAFETY_SECONDS
from tests.helpers.worlds import wait_until


def test_an_ended_episode_reports_nothing(play):
    plays = play("Echo")
    plays.start(0, 1)
    plays.pool.step(0, "a")
    plays.pool.end(0)
    assert set(plays.step({1: "b"})) == {1} and plays.pool.poll() == []


@pytest.mark.parametrize("at", range(3))
def test_a_killed_worker_changes_nothing_but_the_count(at, play):
    undisturbed, plays = play("Echo"), play("Echo")
    for each in (undisturbed, plays):
        each.start(0, 1)
    for turn in range(3):
        texts = {0: f"a{turn}", 1: f"b{turn}"}
        expected = undisturbed.step(texts)
        if turn == at:
            os.kill(plays.processes()[0], signal.SIGKILL)
        found = plays.step(texts)
        for number in (0, 1):
            assert found[number].observation == expected[number].observation
            assert found[number].replayed == (turn == at)


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


def test_an_environment_that_cannot_be_replayed_is_tried_again_before_its_first_turn_alone(play):
    plays = play("Unrepeatable", retries=2)
    plays.start(0)
    assert plays.text(0, "a") == "0: a"
    event = plays.step({0: "break"})[0]
    assert event.failure.startswith("KeyError: 1 (") and event.replayed == 0


def test_a_factory_that_fails_is_a_failure_of_the_episode(play):
    event = play("tests.helpers.envs.odd_environments:_seen", retries=0).start(0)[0]
    assert event.failure.startswith("TypeError: _seen() missing 1 required positional argument")


def test_answers_of_the_journal_need_no_worker(play, tmp_path):
    first = play("Echo", Journal(tmp_path / "journal", 0, 1))
    first.start(0, key="1/2/3")
    first.text(0, "a")
    second = play("Echo", Journal(tmp_path / "journal", 0, 1))
    assert second.start(0, key="1/2/3")[0].from_journal
    assert second.text(0, "a") == "0: a" and second.processes() == []
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


PICTURES = "tests.helpers.envs.sum_environments:PicturedSums"


def test_images_are_kept_once_beside_the_journal(play, tmp_path):
    folder, found = tmp_path / "images", []
    processor = processor_of(write_folder(tmp_path / "model"))
    for _ in range(2):
        images = Images(processor)
        images.keep_in(folder)
        plays = play(PICTURES, Journal(tmp_path / "journal", 0, 1), images=images)
        events = [plays.start(0, key="k")[0], plays.step({0: "a"})[0], plays.step({0: "bc"})[0]]
        texts = [event.observation.messages[0]["content"] for event in events]
        assert [len(images.found(text)) for text in texts] == [1, 1, 1]
        found.append(texts)
        assert [bool(event.images) for event in events] == [not event.from_journal for event in events]
    assert found[0] == found[1] and plays.processes() == []
    digests = {match[1] for text in found[0] for match in PATTERN.finditer(text)}
    assert {path.name for path in folder.iterdir()} == digests
    assert "base64" not in (tmp_path / "journal" / "replica_00000.jsonl").read_text()


@pytest.mark.parametrize("images, said", [
    (None, "its messages have images; the model has no vision tower, or no chat template"),
    long((Images("it has no image processor"), "a message has images; it has no image processor")),
])  # fmt: skip
def test_images_that_the_policy_cannot_read_are_failures(images, said, play):
    assert play(PICTURES, retries=0, images=images).start(0)[0].failure == said


def test_the_module_of_an_environment_is_not_imported_here(play, monkeypatch):
    monkeypatch.delitem(sys.modules, "tests.helpers.envs.sum_environments", raising=False)
    plays = play("tests.helpers.envs.sum_environments:Sums")
    plays.pool.start(0, Task([]))
    plays.collect([0])
    assert "tests.helpers.envs.sum_environments" not in sys.modules


# -- which process an episode gets, and when one ends ------------------------------------------------------------------


def _runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


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
    assert len(plays.processes()) <= 1 + MAX_ALONE
    for number in healthy:
        plays.pool.end(number)
    assert len(plays.processes()) == 1  # what was stuck, and what was alone, has ended


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
