"""Heartbeats of real ranks: one that sleeps, is stopped, holds the store or ends; the limits of collectives."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import types
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megarl.comm import role_mesh
from megarl.faults import heartbeat
from megarl.observe import activity, status_file
from megarl.observe.timers import Timers
from megarl.trainers import setup
from tests.helpers.faults import sleep_for_ever
from tests.helpers.programs import program
from tests.helpers.worlds import SAFETY, SAFETY_SECONDS, RankFailed, run_world, wait_until
from tools._run_reader import RunReader


def tcp_store(rank: int, server: int):
    """A client of a TCPStore that rank `server` serves."""
    meeting = dist.distributed_c10d._get_default_store()
    if rank == server:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=SAFETY)
        meeting.set("port", str(store.port))
        return store
    return dist.TCPStore("127.0.0.1", int(meeting.get("port")), is_master=False, timeout=SAFETY)


class Impatient(heartbeat.Heartbeat):
    """Has a long limit until `is_time(heartbeat)` holds, then a short one: so the test does not depend on the clock."""

    is_time = None

    def _look(self):
        if self.is_time():
            self._watch._limit = 0.0
        super()._look()


def start(rank: int, store, is_time, timers: Timers, folder: Path | None = None) -> Impatient:
    heartbeat.MAX_INTERVAL, Impatient.is_time = 0.02, is_time
    return Impatient(store.clone(), rank, 2, SAFETY, timers, folder=folder)


def one_sleeps(rank: int, folder: Path):
    timers = Timers()
    timers.step = 7

    def is_time(self):
        states = self._read(range(2))
        positions = [states[rank]["where"] if rank in states else "" for rank in range(2)]
        return positions[0].startswith("all_reduce") and positions[1].endswith("sleep_for_ever")

    store = tcp_store(rank, 0)
    beat = start(rank, store, is_time, timers, folder)
    beat._watch.silence = lambda *_: None  # with a limit of 0 s every rank is silent
    with timers.phase("critic", "update"):
        if rank == 1:
            sleep_for_ever()
        dist.all_reduce(torch.ones(1))


def test_a_rank_that_sleeps_for_ever_is_found(tmp_path, capfd):
    with pytest.raises(RankFailed, match="ended with exit code 1"):
        run_world(one_sleeps, 2, tmp_path)
    lines = capfd.readouterr().err.splitlines()
    lines = lines[next(i for i, line in enumerate(lines) if line.startswith("megarl: hung: ")) :]
    assert "progress for" in lines[0] and lines[0].endswith("; not in a collective: rank 1 (critic/update)")
    waiting, sleeping = ([line.split() for line in lines if line.split()[:1] == [rank]][0] for rank in "01")
    assert waiting[1:3] == ["critic/update", "7"] and "all_reduce" in waiting
    assert sleeping[1:3] == ["critic/update", "7"] and sleeping[-1] == "sleep_for_ever"
    assert f"megarl: hung: stacks and last collectives of each rank are in {tmp_path}/hang/rank_*.txt" in lines, lines
    check_files(tmp_path / "hang")


def check_files(folder: Path):
    """What both ranks of `one_sleeps` leave: who waits in which collective, and who sleeps."""
    waiting, sleeping = ((folder / f"rank_{rank}.txt").read_text() for rank in range(2))
    assert waiting.startswith("rank 0, ") and ": critic/update of step 7\n" in waiting.splitlines(keepends=True)[0]
    assert " in all_reduce\n" in waiting and " in sleep_for_ever\n" in sleeping and "sleep_for_ever" not in waiting
    last = waiting.splitlines()[-1].split()
    assert last[1:] == ["gloo:all_reduce", "not", "ended", "[1]", "0", "0-1"] and "gloo:all_reduce" not in sleeping
    (entry,) = json.loads((folder / "rank_0.json").read_text())["entries"]
    assert entry["profiling_name"] == "gloo:all_reduce" and not entry["retired"]
    assert any(frame["name"] == "one_sleeps" for frame in entry["frames"])
    assert json.loads((folder / "rank_1.json").read_text())["entries"] == []
    command = [
        sys.executable,
        "-m",
        "torch.distributed.flight_recorder.fr_trace",
        str(folder / "flight_recorder"),
        "-j",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SAFETY_SECONDS)
    assert done.returncode == 0 and "all_reduce" in done.stdout + done.stderr, done.stdout + done.stderr


def is_stopped(pid: int) -> bool:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rsplit(")", 1)[1].split()[0] == "T"


def one_is_stopped(rank: int, server: int):
    store = tcp_store(rank, server)
    if rank == 0:
        store.set("pid", str(os.getpid()))
    pid = int(store.get("pid"))
    beat = start(rank, store, lambda self: rank == 1 and is_stopped(pid), Timers())
    store.set(f"ready{rank}", "")
    if rank == 0:
        store.get("ready1")
        while True:  # every thread of the process stops, also after somebody continues it
            os.kill(pid, signal.SIGSTOP)
    if server == 0:
        assert wait_until(lambda: is_stopped(pid))
        beat.limit = 0.0
    beat._thread.join()


@pytest.mark.parametrize("server, needle", [
    (1, "rank 0 (set-up) has sent no heartbeat for"), (0, "the store has not answered rank 1 for "),
])  # fmt: skip
def test_a_stopped_rank_0_is_found_by_rank_1(server, needle, capfd):
    """Also if the store is in its process, as without torchrun and launcher."""
    with pytest.raises(RankFailed, match="rank 1 of 2 ended with exit code 1"):
        run_world(one_is_stopped, 2, server)
    assert f"megarl: hung: {needle}" in capfd.readouterr().err


def one_ends_early(rank: int) -> bool:
    store, ends = tcp_store(rank, 0), []
    heartbeat.MAX_INTERVAL = 0.02
    beat = heartbeat.Heartbeat(store.clone(), rank, 2, SAFETY, Timers(), ends.append)
    assert rank == 1 or wait_until(lambda: beat._watch.is_done(1))
    beat.finish()
    assert not beat._thread.is_alive()
    beat._watch._limit = 0.0  # the thread has ended: with this limit it would find itself silent
    assert rank == 1 or beat._watch.silence(1) is None
    dist.barrier()
    return ends == []


def test_a_rank_that_has_ended_its_work_is_not_hung():
    assert run_world(one_ends_early, 2) == [True, True]


def reports_status(rank: int, folder: Path) -> list[dict]:
    """Rank 0 looks at status.json while rank 1 is in a phase, and after both have ended."""
    heartbeat.MAX_INTERVAL, timers = 0.02, Timers()
    timers.step = rank + 4
    store, reader = tcp_store(rank, 0), RunReader(folder)
    beat = heartbeat.Heartbeat(store.clone(), rank, 2, SAFETY, timers, os._exit, folder)

    def seen() -> bool:
        reader.update()
        return reader.status is not None and reader.status["ranks"][1][:3] == ["critic", "update", 5]

    with contextlib.ExitStack() as inside:
        if rank == 1:
            inside.enter_context(timers.phase("critic", "update"))
        assert rank == 1 or wait_until(seen)
        during = reader.status
        dist.barrier()
    beat.finish()
    dist.barrier()
    reader.update()
    return [during, reader.status]


def test_rank_0_keeps_status_json_up_to_date(tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    (during, after), _ = run_world(reports_status, 2, tmp_path)
    assert during["state"] == "running" and during["world_size"] == 2 and during["limit"] == SAFETY.total_seconds()
    assert during["ranks"][0][:3] == [None, None, 4] and not during["ranks"][1][5]
    assert after["state"] == "ended" and after["problem"] is None and after["writes"] > during["writes"]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []  # no temporary file is left


def is_held_up(rank: int, folder: Path) -> int:
    """Beats of a rank whose status file hangs in its first write."""
    heartbeat.MAX_INTERVAL = 0.02
    started = threading.Event()

    def hang(self, content):
        started.set()
        threading.Event().wait()

    status_file.StatusFile._write, status_file.CLOSE_SECONDS = hang, 0.0
    beat = heartbeat.Heartbeat(tcp_store(0, 0), 0, 1, SAFETY, Timers(), os._exit, folder)
    assert started.wait(SAFETY.total_seconds())
    before = beat._beats
    assert wait_until(lambda: beat._beats > before + 2)
    beat.finish()
    return beat._beats


def test_a_file_system_that_hangs_stops_no_heartbeat(tmp_path):
    (beats,) = run_world(is_held_up, 1, tmp_path)
    assert beats > 3


@pytest.mark.parametrize("size, seconds", [(2, 2.0), (128, 2.0), (1024, 16.0), (8192, 30.0)])
def test_the_larger_the_world_the_rarer_the_heartbeats_of_a_run_with_a_folder(size, seconds, tmp_path):
    class Quiet(heartbeat.Heartbeat):
        _publish = _run = _watch_store = lambda *_: None

    store, limit = types.SimpleNamespace(set_timeout=lambda limit: None), timedelta(minutes=10)
    assert Quiet(store, 1, size, limit, Timers(), os._exit, tmp_path).interval == seconds
    plain = Quiet(store, 1, size, limit, Timers())
    assert (plain.interval, plain._patience) == (30.0, 60.0)


def limits(rank: int, config) -> tuple[set, bool]:
    mesh = setup.create_role_mesh(config, Timers())
    groups = [group for group in dist.distributed_c10d._world.pg_map if group is not dist.group.WORLD]
    timeouts = {group._get_backend(torch.device("cpu")).options._timeout for group in groups}
    before = heartbeat.collectives_so_far()
    mesh["actor"].dp_all_reduce(torch.ones(1))
    dist.barrier()
    found = heartbeat.collectives_so_far() - before
    heartbeat.finish()
    return timeouts, found


def test_collectives_of_a_run_have_no_time_limit_and_are_counted(tmp_path):
    flags = "--role-map actor=0-1;critic=0;reference=1;reward=0 --num-layers 1 --hidden-size 32 --num-attention-heads 2"
    config = program("rl", [*flags.split(), "--max-prompt-length", "4", "--max-response-length", "4"], 2)
    assert run_world(limits, 2, config) == [({role_mesh.NO_LIMIT}, 2)] * 2


def failures(rank: int) -> list[bool | None]:
    """What a rank learns that fails, reports it and asks again; the ranks do so in turn, then in the other order."""
    found = []
    for order in (range(dist.get_world_size()), reversed(range(dist.get_world_size()))):
        for turn in order:
            dist.barrier()
            if turn == rank:
                found.append(heartbeat.is_first_to_fail())
                heartbeat.report_failure()
                found.append(heartbeat.is_first_to_fail())
        dist.barrier()
        if rank == 0:
            dist.distributed_c10d._get_default_store().delete_key(f"{heartbeat.KEY}/failed")
        dist.barrier()
    return found


def test_one_rank_alone_is_the_first_to_fail():
    first, last, no = [True] * 2 + [False] * 2, [False] * 2 + [True] * 2, [False] * 4
    assert run_world(failures, 3) == [first, no, last]


def joined_limit(rank: int):
    dist.destroy_process_group()
    del os.environ["RANK"]
    role_mesh.join_process_group(timedelta(seconds=5), role_mesh.NO_LIMIT)
    store = dist.distributed_c10d._get_default_store()
    return dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout, store.timeout


def test_after_the_first_meeting_neither_collectives_of_the_world_nor_waits_in_the_store_have_a_limit():
    assert run_world(joined_limit, 1) == [(role_mesh.NO_LIMIT, role_mesh.NO_LIMIT)]


def test_work_and_collectives_and_file_traffic_are_progress(tmp_path, monkeypatch):
    """A rank that computes for hours without a collective is not hung, nor one that writes a checkpoint."""
    monkeypatch.setattr(heartbeat, "PROCESS_IO", tmp_path / "io")
    at_rest = heartbeat.progress_so_far(0)
    (tmp_path / "io").write_text(f"rchar: 7\nwchar: {heartbeat.IO_BYTES - 8}\n")
    assert heartbeat.progress_so_far(0) == at_rest
    activity.tick()
    assert heartbeat.progress_so_far(0) == at_rest + 1
    (tmp_path / "io").write_text(f"rchar: 7\nwchar: {heartbeat.IO_BYTES}\n")
    assert heartbeat.progress_so_far(2) == at_rest + 4
