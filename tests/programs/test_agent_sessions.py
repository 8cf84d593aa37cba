"""Runs whose episodes drivers of other processes play (`--agent-sessions`): the bytes of the same agent in the run."""

import contextlib
import functools
import json
import socket
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path

import pytest

from megarl.errors import UsageError
from megarl.replay import prepared
from tests.helpers.envs import session_driver
from tests.helpers.envs.sum_environments import EPISODES
from tests.helpers.programs import inputs, metrics, rl_argv, samples, timeless, train
from tests.helpers.rollout.engine_records import generated
from tests.helpers.rollout.replays import played
from tests.helpers.tiers import long
from tests.helpers.waiting import SAFETY_SECONDS
from tests.helpers.worlds import RankFailed

KEY = "0123456789abcdef"


@contextlib.contextmanager
def driver(kind: str = "sums", key: str = "") -> Iterator[str]:
    """Flags of a run whose sessions a driver in another process plays; at the end the driver has ended, too."""
    port = session_driver.free_port()
    process = get_context("fork").Process(target=session_driver.main, args=(f"http://127.0.0.1:{port}", key, kind))
    process.start()
    try:
        yield f"--agent-sessions --port {port}"
        process.join(SAFETY_SECONDS)
        assert process.exitcode == 0
    finally:
        process.kill()
        process.join()


def run(save: Path, flags: str, size: int = 1) -> Path:
    train("rl", rl_argv(save, f"{EPISODES} {flags}"), size)
    return save


@functools.cache
def in_the_run() -> Path:
    """The same agent as a coroutine of the run."""
    return run(inputs() / "sums-in-the-run", "--environment tests.helpers.envs.agents:sums")


def record(save: Path) -> list[dict]:
    return [json.loads(line) for line in (save / "sessions.jsonl").read_text().splitlines()]


def assert_same(found: Path, steps=(1, 2), size: int = 1):
    """Tokens, log-probs and samples; metrics but for times."""
    for step in steps:
        assert samples(found, step) == samples(in_the_run(), step)
        if size == 1:
            assert generated(found, step) == generated(in_the_run(), step)
            assert timeless(metrics(found)[step]) == timeless(metrics(in_the_run())[step])


@pytest.mark.parametrize("size, flags", [(1, ""), long((2, "--rollout-max-requests 2 --rollout-dispatch dynamic"))])
def test_a_driver_of_another_process_gives_the_bytes_of_the_agent(size, flags, tmp_path):
    with driver() as sessions:
        save = run(tmp_path / "run", f"{sessions} {flags}", size)
    assert_same(save, size=size)
    events = record(save)
    assert [event["event"] for event in events].count("finished") == 24 == len(events) // 2
    if size == 1:  # siblings of a group one after another
        groups = [event["group"] for event in events if event["event"] == "claimed"]
        assert groups[::2] == groups[1::2] and len({*groups}) == 12


@pytest.mark.long
def test_a_run_with_keys_is_resumed(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text(f"{KEY}\n")
    with driver(key=KEY) as sessions:
        run(tmp_path / "run", f"{sessions} --api-key-file {keys} --train-iters 1 --lr-decay-iters 2")
    with driver(key=KEY) as sessions:
        flags = f"{sessions} --api-key-file {keys} --load {tmp_path / 'run'} --lr-decay-iters 2"
        save = run(tmp_path / "run", flags)
    assert_same(save)
    assert {event["group"].split("/")[0] for event in record(save)} == {"1", "2"}
    words = ["--step", "2", "--sample", "3"]
    status, text = played(save, words)
    assert status == 0 and text.count("the same tokens and log-probs") == text.count("\nturn ") > 0
    with pytest.raises(UsageError, match="the driver of a session is outside of the run"):
        prepared([str(save), *words, "--from-turn", "1", "--answer", "x"])


@pytest.mark.long
def test_sessions_that_are_left_expire_and_are_offered_again(tmp_path):
    with driver("faults") as sessions:
        # Seconds and retries with which no session that is used expires on a busy machine.
        save = run(tmp_path / "run", f"{sessions} --environment-timeout 4 --environment-retries 99")
    assert_same_text(save)
    rows = metrics(save)
    assert sum(rows[step]["environment/restarts"] for step in rows) > 0
    assert all(rows[step]["environment/failures"] == 0 for step in rows)


def assert_same_text(save: Path):
    for step in (1, 2):
        assert samples(save, step) == samples(in_the_run(), step)


@pytest.mark.long
def test_a_run_without_a_driver_stops_and_says_so(tmp_path):
    with pytest.raises(RankFailed, match="no driver has asked for a session, or in one, for 1 s"):
        run(tmp_path / "run", "--agent-sessions --port 0 --environment-timeout 1")


@pytest.mark.long
def test_a_port_that_is_taken_is_refused(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(RankFailed, match="cannot listen there"):
        run(tmp_path / "run", f"--agent-sessions --port {taken.getsockname()[1]}")
