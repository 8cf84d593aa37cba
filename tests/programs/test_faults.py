"""Faults of real runs: a rank that raises or hangs in a phase, signals, kills and restarts."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import pytest

from megarl.checkpoint import host_memory
from megarl.faults import last_line
from megarl.observe import activity
from megarl.trainers import launch, setup
from tests.helpers import faults
from tests.helpers.processes import free_port
from tests.helpers.programs import (
    GRADED,
    environment,
    inputs,
    metrics,
    rl_argv,
    samples,
    sft_argv,
    timeless_rows,
    torchrun,
)
from tests.helpers.tiers import by_default
from tests.helpers.worlds import SAFETY_SECONDS
from tools import record_runs
from tools._run_reader import RunReader

TWO = "--role-map rollout=0;actor=1;critic=0;reward=0;reference=1"
THREE = "--role-map rollout=0;actor=1-2;critic=0;reward=0;reference=1"
PHASES = {  # phase: the rank that enters it
    ("rollout", "rollout"): 0, ("reward", "score"): 0, ("reference", "logprobs"): 1, ("critic", "values"): 0,
    ("actor", "logprobs"): 1, ("actor", "advantages"): 1, ("actor", "update"): 1, ("critic", "update"): 0,
    ("rollout", "sync"): 0, ("actor", "save"): 1, faults.EVALUATE: 1,
}  # fmt: skip
NOT_SCORED = [("reward", "score"), ("reference", "logprobs"), ("actor", "logprobs")]
RAISES, SLEEPS = [("critic", "update")], [("actor", "update")]


def every_phase(chosen: list[tuple[str, str]]) -> list:
    """A case for each phase; the others are long."""
    return [pytest.param(phase, marks=[] if phase in chosen else pytest.mark.long, id="-".join(phase))
            for phase in PHASES]  # fmt: skip


def argv(folder, more: str) -> list[str]:
    """A run of two ranks that saves and evaluates each step."""
    held_out = f"--eval-prompts {inputs()}/heldout.jsonl --eval-interval 1 --eval-samples 4"
    return rl_argv(folder, f"{TWO} --save-interval 1 {GRADED} {held_out} {more}")


def status_of(folder) -> dict:
    """The checked content of a run's status.json."""
    reader = RunReader(folder)
    reader.update()
    assert reader.problem is None
    return reader.status


def assert_known_samples(file, complete, is_scored: bool):
    """A file of the failed first step has what a run that did not fail has, and the rewards if these were known."""
    expected = {row["sequence"]: row for row in map(json.loads, samples(complete, 1).splitlines())}
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert rows
    for row in rows:
        whole = expected[row["sequence"]]
        assert all(row[name] == whole[name] for name in ("prompt", "response", "answer", "length", "finished"))
        assert row["reward"] == (pytest.approx(whole["reward"], abs=1e-6) if is_scored else None)


def place(phase: tuple[str, str]) -> str:
    """The phase in messages."""
    return "program/between phases" if phase == faults.EVALUATE else "/".join(phase)


@pytest.mark.parametrize("phase", every_phase(RAISES))
def test_a_rank_that_raises_ends_the_run_and_says_where(phase, tmp_path, capfd, undisturbed):
    """Its samples of the step are kept, if it has any by then. Long: pytest -m long tests/programs/test_faults.py"""
    rank = PHASES[phase]
    status = faults.run(argv(tmp_path, "--train-iters 2"), 2, lambda: (
        faults.in_phase(phase, 1, faults.raise_error) if faults.rank() == rank else None))  # fmt: skip
    lines = capfd.readouterr().err.splitlines()
    assert status == 1
    assert lines[0].startswith(f"megarl: rank {rank} failed in {place(phase)} of step 1: ValueError: injected (")
    assert lines[-1] == lines[0] and sum("megarl: rank" in line for line in lines) == 2
    (file,) = (tmp_path / "samples").glob("failed_*") if phase != ("rollout", "rollout") else [None]
    assert lines[0].endswith(f"; the samples of the step are in {file}") == (file is not None)
    if file is not None:
        assert file.name == f"failed_step_00000001_rank_{rank}.jsonl"
        assert_known_samples(file, undisturbed, is_scored=phase not in NOT_SCORED)


@pytest.mark.parametrize("phase", every_phase(SLEEPS))
def test_a_rank_that_sleeps_for_ever_ends_the_run_and_is_named(phase, tmp_path, capfd):
    """Long: pytest -m long tests/programs/test_faults.py"""
    rank, asleep = PHASES[phase], tmp_path / "asleep"

    def sleep():
        asleep.touch()
        faults.sleep_for_ever()

    def prepare():
        faults.watch_after(asleep)
        if faults.rank() == rank:
            faults.in_phase(phase, 1, sleep)

    status = faults.run(argv(tmp_path / "run", "--train-iters 2"), 2, prepare)
    lines = capfd.readouterr().err.splitlines()
    assert status == 1
    assert lines[0].startswith("megarl: hung: "), lines
    found = status_of(tmp_path / "run")
    assert found["state"] == "hung" and f"megarl: hung: {found['problem']}" == lines[0]
    row = next(line.split() for line in lines[1:] if line.split()[0] == str(rank))
    where = "between phases" if phase == faults.EVALUATE else place(phase)
    assert " ".join(row[1:]).startswith(f"{where} 1 ") and row[-1] == "sleep_for_ever", lines
    hang = tmp_path / "run" / "hang"
    assert f"megarl: hung: stacks and last collectives of each rank are in {hang}/rank_*.txt" in lines, lines
    stacks = [(hang / f"rank_{number}.txt").read_text() for number in range(2)]
    assert "in sleep_for_ever" in stacks[rank] and "in sleep_for_ever" not in stacks[1 - rank]
    assert all("recorded collectives" in text and "gloo:" in text for text in stacks)


@pytest.mark.long
def test_a_role_that_works_for_three_times_the_limit_does_not_end_the_run(undisturbed, tmp_path, monkeypatch):
    """The critic's update takes a minute of small work, with a limit of 20 s; the actor waits for it.

    Long: pytest -m long tests/programs/test_faults.py
    """
    monkeypatch.setattr(setup, "progress_limit", lambda config: timedelta(seconds=20))

    def work():
        end = time.monotonic() + 60
        while time.monotonic() < end:
            activity.tick()
            time.sleep(0.1)

    def prepare():
        if faults.rank() == 0:
            faults.in_phase(("critic", "update"), 2, work)

    assert faults.run(argv(tmp_path, "--train-iters 3"), 2, prepare) == 0
    assert_same_run(tmp_path, undisturbed)


@pytest.mark.long
@pytest.mark.parametrize("restarts, status", [(1, 0), (0, 1)])
def test_torchrun_starts_a_run_again(restarts, status, tmp_path, undisturbed):
    """Long: pytest -m long tests/programs/test_faults.py"""
    plug_in = "--reward tests.helpers.faults:graded_reward"
    done = torchrun("megarl.train_rl", argv(tmp_path, f"--train-iters 3 {plug_in}"), 2, restarts)
    assert done.returncode == status, done.stderr
    if not status:
        assert rows_of(tmp_path) == rows_of(undisturbed)


@pytest.mark.long
@pytest.mark.parametrize("reward, status", [("kill_second_rank", 137), ("fail_on_second_rank", 1)])
def test_under_torchrun_too_the_cause_is_the_last_line(reward, status, tmp_path, monkeypatch):
    """Long: pytest -m long tests/programs/test_faults.py"""
    monkeypatch.setenv(last_line.SAVE, str(tmp_path))  # as the launcher does after its check
    flags = f"--train-iters 3 --save-interval 1 --reward-max-failures 0 --reward tests.helpers.faults:{reward}"
    done = torchrun("megarl.train_rl", rl_argv(tmp_path, flags), 2, launcher="megarl.torchrun")
    lines = done.stderr.splitlines()
    assert done.returncode == status and "ChildFailedError" not in done.stderr
    assert sum(line.startswith("Traceback") for line in lines) == 0, done.stderr
    assert status_of(tmp_path)["state"] == "failed"
    if reward == "kill_second_rank":
        assert lines[-1] == f"megarl: rank 1 was ended by SIGKILL (saved: step 1); resume with --load {tmp_path}"
    else:
        assert lines[-1].startswith("megarl: rank ") and "KeyError: 'second' (" in lines[-1]
        assert lines.index(lines[-1]) < len(lines) - 1  # the rank has said so first


def test_a_plug_in_that_exits_fails_the_run(tmp_path, capfd):
    status = faults.run(
        argv(tmp_path, "--train-iters 2"), 2, lambda: faults.in_phase(("reward", "score"), 1, lambda: sys.exit(0))
    )
    assert status == 1
    assert capfd.readouterr().err.startswith("megarl: rank 0 failed in reward/score of step 1: SystemExit: 0 (")
    found = status_of(tmp_path)
    assert found["state"] == "failed" and len(found["ranks"]) == 2


# -- signals and restarts ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Three steps in one go."""
    folder = tmp_path_factory.mktemp("undisturbed")
    assert faults.run(argv(folder, "--train-iters 3"), 2) == 0
    return folder


@pytest.fixture(scope="module")
def undisturbed_on_three(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed-on-three")
    assert faults.run(argv(folder, f"--train-iters 3 {THREE}"), 3) == 0
    return folder


def rows_of(save) -> list[dict]:
    """Metrics of all steps without those of time, and without those named after a plug-in."""
    rows = timeless_rows(save, range(4)).values()
    return [{k: v for k, v in row.items() if k != "weights/sync_s" and "graded_reward" not in k} for row in rows]


def assert_same_run(folder, other):
    assert rows_of(folder) == rows_of(other)
    assert all(samples(folder, step) == samples(other, step) for step in (1, 2, 3))
    last = [record_runs.checkpoints_of(save) for save in (folder, other)]
    last = [{k: v for k, v in found.items() if k.startswith("step_00000003/")} for found in last]
    assert last[0] == last[1] and len(last[0]) > 50


@pytest.fixture
def memory(monkeypatch):
    """A folder in host memory for `--save-memory`."""
    with tempfile.TemporaryDirectory(dir=host_memory.DEFAULT) as folder:
        monkeypatch.setenv(host_memory.ROOT, folder)
        yield Path(folder)


@pytest.fixture
def end_file(tmp_path_factory, monkeypatch):
    """File in which the first rank notes why it ended."""
    file = tmp_path_factory.mktemp("end") / "reason"
    monkeypatch.setenv("MEGARL_END_FILE", str(file))
    return file


def test_a_signal_on_one_rank_saves_on_all_and_the_run_goes_on_exactly(undisturbed, tmp_path, capfd, end_file):
    """The signal reaches one of two ranks, in the first step."""
    flags = "--train-iters 3 --save-interval 0"
    status = faults.run(argv(tmp_path, flags), 2, lambda: faults.rank() == 1 and faults.in_phase(
        ("actor", "update"), 1, lambda: faults.signal_self(signal.SIGUSR1)))  # fmt: skip
    lines = capfd.readouterr().err.splitlines()
    assert status == 0 and lines[0].startswith("megarl: SIGUSR1: stopping before step "), lines
    last = int(lines[0].split()[5].rstrip(";"))
    assert lines[1:] == [f"megarl: stopped by a signal after step {last - 1}; resume with --load {tmp_path}"]
    assert (tmp_path / "checkpoints" / "latest").read_text() == f"step_{last - 1:08d}\n"
    assert end_file.read_text() == "signal"
    end_file.unlink()
    assert status_of(tmp_path)["state"] == "ended"
    assert faults.run(argv(tmp_path, f"{flags} --load {tmp_path}"), 2) == 0
    assert_same_run(tmp_path, undisturbed)
    assert not end_file.exists()


@pytest.mark.long
def test_a_supervised_run_is_saved_after_a_signal(tmp_path):
    def prepare():
        faults.in_phase(("actor", "update"), 2, lambda: faults.signal_self(signal.SIGINT))

    whole, save, flags = tmp_path / "whole", tmp_path / "stopped", "--train-iters 5"
    assert faults.run(sft_argv(whole, flags), 1, name="sft") == 0
    assert faults.run(sft_argv(save, flags), 1, prepare, name="sft") == 0
    assert (save / "checkpoints" / "latest").read_text() == "step_00000002\n"
    assert faults.run(sft_argv(save, f"{flags} --load {save}"), 1, name="sft") == 0
    assert timeless_rows(save, range(1, 6)) == timeless_rows(whole, range(1, 6))


def test_without_save_a_signal_ends_a_run_with_status_0(tmp_path, capfd):
    flags = sft_argv(tmp_path, "--train-iters 500")
    del flags[flags.index("--save") : flags.index("--save") + 2]
    status = faults.run(flags, 1, lambda: faults.in_phase(
        ("actor", "update"), 2, lambda: os.kill(os.getppid(), signal.SIGTERM)), name="sft")  # fmt: skip
    lines = capfd.readouterr().err.splitlines()
    assert status == 0 and lines[-1].endswith("; without --save nothing is saved"), lines
    assert not list(tmp_path.iterdir())


def kill_at(*faulty: tuple[int, tuple[str, str], int]):
    """Kills a rank (rank, phase, step) in each attempt."""

    def prepare():
        if faults.attempt() < len(faulty) and faults.rank() == faulty[faults.attempt()][0]:
            _, phase, step = faulty[faults.attempt()]
            faults.in_phase(phase, step, lambda: os.kill(os.getpid(), signal.SIGKILL))

    return prepare


def test_a_run_with_killed_ranks_is_started_again_and_gives_the_same_numbers(undisturbed, tmp_path, capfd):
    """Killed before the first checkpoint, in an update, while it saves, and after the last checkpoint."""
    kills = (0, ("rollout", "rollout"), 1), (1, ("actor", "update"), 2), (1, ("actor", "save"), 2)
    status = faults.run(argv(tmp_path, "--train-iters 3"), 2, kill_at(*kills), restarts=3)
    assert status == 0
    ended = [line for line in capfd.readouterr().err.splitlines() if line.startswith("megarl: rank")]
    assert {line.split("ended by ")[1] for line in ended if "ended" in line} == {"SIGKILL"}
    assert_same_run(tmp_path, undisturbed)


IN_MEMORY, ON_DISK = "resumes from step 2 in host memory", "resumes from step 1 on the disk"
DAMAGED = "__0_0.distcp is damaged (its content does not have its checksum)"
AFTER_A_KILL = {  # what happens before the second start, nodes, what it says
    "nothing": (lambda memory: None, 1, [IN_MEMORY]),
    "nothing, async": (lambda memory: None, 1, ["in host memory"]),
    "nothing, nodes": (lambda memory: None, 3, [IN_MEMORY]),
    "a lost node": (lambda memory: shutil.rmtree(memory / "node-1"), 2, [IN_MEMORY]),
    "the first node lost": (lambda memory: shutil.rmtree(memory / "node-0"), 3, [IN_MEMORY]),
    "a damaged copy of two": (lambda memory: faults.damage(memory / "node-0"), 3, [DAMAGED, IN_MEMORY]),
    "a damaged copy": (faults.damage, 1, [f"{DAMAGED}; step_00000001 is used", ON_DISK]),
    "both copies damaged": (lambda memory: faults.damage(memory / "node-0", memory / "node-2"), 3,
                            ["no node has __0_0.distcp whole; an earlier checkpoint is used", ON_DISK]),
    "two lost nodes": (lambda memory: [shutil.rmtree(memory / f"node-{node}") for node in (0, 2)], 3, [ON_DISK]),
}  # fmt: skip


@pytest.mark.parametrize("case", by_default(AFTER_A_KILL, ["a lost node"]))
def test_a_killed_run_goes_on_from_host_memory(case, request, tmp_path, memory, capfd):
    """The disk has the first step, as the best so far. Long: pytest -m long tests/programs/test_faults.py"""
    happens, nodes, said = AFTER_A_KILL[case]
    flags = "--train-iters 3 --save-interval 3 --save-memory" + " --async-save" * ("async" in case)
    more = THREE if nodes == 3 else ""

    def prepare():
        if nodes > 1:
            faults.as_nodes(memory)
        if faults.attempt() == 0 and faults.rank() == 1:
            faults.in_phase(("actor", "update"), 3, kill)

    def kill():
        happens(memory)
        os.kill(os.getpid(), signal.SIGKILL)

    assert faults.run(argv(tmp_path, f"{flags} {more}"), max(2, nodes), prepare, restarts=1) == 0
    printed = capfd.readouterr().err
    assert "restart 1 of at most 1" in printed and all(text in printed for text in said), printed
    assert_same_run(tmp_path, request.getfixturevalue("undisturbed_on_three" if nodes == 3 else "undisturbed"))
    assert not [*memory.rglob("step_*")] and not (tmp_path / "checkpoints" / host_memory.POINTER).exists()


@pytest.mark.long
@pytest.mark.one_thread  # else the launchers execute torchrun
def test_launchers_of_two_nodes_go_on_from_host_memory(undisturbed, tmp_path, memory):
    """Long: pytest -m long tests/programs/test_faults.py"""
    flags = "--train-iters 3 --save-interval 3 --save-memory --reward tests.helpers.faults:late_graded_reward"
    port, started = str(free_port()), []
    for node in ("0", "1"):
        (memory / node).mkdir()
        nodes = ["--nnodes", "2", "--node-rank", node, "--master-addr", "127.0.0.1", "--master-port", port]
        command = [*nodes, "--nproc-per-node", "1", "--max-restarts", "1", "train_rl", *argv(tmp_path, flags)]
        variables = environment() | {host_memory.ROOT: str(memory / node)}
        started.append(subprocess.Popen([sys.executable, "-m", "megarl.launcher", *command], env=variables,
                                        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True))  # fmt: skip
    printed = [process.communicate(timeout=SAFETY_SECONDS)[1] for process in started]
    assert [process.returncode for process in started] == [0, 0], printed
    assert all("megarl: restart 1 of at most 1" in text for text in printed) and IN_MEMORY in printed[0], printed
    assert rows_of(tmp_path) == rows_of(undisturbed)


def test_a_run_that_was_killed_after_its_last_step_has_nothing_left_to_do(undisturbed, tmp_path, capfd):
    shutil.copytree(undisturbed, tmp_path / "run")
    before = metrics(undisturbed)

    def fail_first():
        if faults.attempt() == 0:
            os._exit(1)

    assert faults.run(argv(tmp_path / "run", "--train-iters 3"), 2, fail_first, restarts=1) == 0
    printed = capfd.readouterr()
    assert printed.out.startswith("megarl: the last step of ")
    assert printed.err == "megarl: restart 1 of at most 1\n" and metrics(tmp_path / "run") == before


def test_wrong_flags_are_not_tried_again(tmp_path, capfd, end_file):
    assert faults.run(argv(tmp_path, "--train-iters 0"), 2, restarts=3) == 2
    assert capfd.readouterr().err.count("\n") == 1 and end_file.read_text() == "wrong input"


def test_wrong_input_of_one_node_is_named(tmp_path, capfd, monkeypatch):
    """The first rank finds its files; the second one, on another node, does not."""
    monkeypatch.setattr(launch, "REPORT_FIRST", 0.1)

    def other_node():
        if faults.rank() == 1:
            os.environ["LOCAL_RANK"] = "0"
            sys.argv[sys.argv.index("--prompts") + 1] = str(tmp_path / "missing.jsonl")

    assert faults.run(argv(tmp_path, "--train-iters 1"), 2, other_node) == 2
    errors = [line for line in capfd.readouterr().err.splitlines() if line.startswith("megarl: error: ")]
    assert len(errors) == 1 and errors[0].startswith("megarl: error: rank 1: ") and "missing.jsonl" in errors[0]
