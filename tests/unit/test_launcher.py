"""Ranks forked by the launcher: they form a group, failures and signals end all; when torchrun is used instead."""

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import get_context
from multiprocessing.context import ForkProcess as Process

import pytest
import torch
import torch.distributed as dist

from megarl import launcher
from megarl.child_process import STOP_SIGNALS
from megarl.cluster import rendezvous
from megarl.errors import CHECKS_FIRST
from tests.helpers.processes import free_port
from tests.helpers.programs import environment
from tests.helpers.tiers import long
from tests.helpers.waiting import SAFETY_SECONDS
from tests.helpers.worlds import wait_until, wait_until_gone

pytestmark = pytest.mark.one_thread  # else the launcher executes torchrun
MODEL = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 128 --swiglu"
LENGTHS = "--max-prompt-length 8 --max-response-length 8"


def rank() -> int:
    return int(os.environ["RANK"])


def note_pid(folder):
    (folder / str(rank())).write_text(str(os.getpid()))


def pids(folder, count: int) -> list[int]:
    """Waits for the pids that `count` ranks note."""
    noted = lambda: [path.read_text() for path in folder.iterdir()]  # noqa: E731
    assert wait_until(lambda: len(noted()) == count and all(noted())), f"{count} ranks did not start"
    return list(map(int, noted()))


def test_ranks_meet_and_end_with_status_0(tmp_path):
    def meet() -> int:
        dist.init_process_group("gloo")
        total = torch.tensor([rank() + 1])
        dist.all_reduce(total)
        names = ("LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        (tmp_path / str(rank())).write_text(" ".join([str(int(total)), *map(os.environ.get, names)]))
        return 0

    before = signal.getsignal(signal.SIGTERM)
    assert launcher.run_ranks(meet, 3) == 0
    assert [(tmp_path / str(i)).read_text() for i in range(3)] == [f"6 {i} 3 3" for i in range(3)]
    assert signal.getsignal(signal.SIGTERM) == before and launcher.can_fork()


def test_a_failing_rank_ends_the_others_and_gives_the_status(tmp_path, capfd):
    def fail() -> int:
        note_pid(tmp_path)
        pids(tmp_path, 3)
        if rank() == 1:
            return 3
        time.sleep(SAFETY_SECONDS)

    assert launcher.run_ranks(fail, 3) == 3
    assert wait_until_gone(pids(tmp_path, 3))
    assert capfd.readouterr().err == ""  # the rank itself has said why


def test_the_traceback_of_a_failing_rank_is_printed(capfd):
    def fail() -> int:
        raise ValueError("of this rank")

    assert launcher.run_ranks(fail, 1) == 1
    assert capfd.readouterr().err.splitlines()[-1] == "ValueError: of this rank"


def test_a_killed_rank_is_named(capfd):
    def die() -> int:
        os.kill(os.getpid(), signal.SIGKILL)

    assert launcher.run_ranks(die, 1) == 128 + signal.SIGKILL
    assert capfd.readouterr().err == "megarl: rank 0 was ended by SIGKILL\n"


def test_a_killed_task_is_named_with_what_resumes_the_run(tmp_path, own_environment, capfd):
    output = tmp_path / "output"
    for said in ("Exited with exit code 137", "Killed"):
        output.write_text(f"srun: error: node1: task 1: {said}\n")
        launcher.tell_killed("137", str(tmp_path), str(output))
    line = "megarl: rank 1 was ended by SIGKILL; no checkpoint is saved: start the run again\n"
    assert capfd.readouterr().err == line


def test_sigterm_reaches_all_ranks(tmp_path):
    def stop() -> int:
        note_pid(tmp_path)
        dist.init_process_group("gloo")  # the launcher serves the store once it can pass signals on
        if rank() == 0:
            os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(SAFETY_SECONDS)

    assert launcher.run_ranks(stop, 2) == 128 + signal.SIGTERM
    assert wait_until_gone(pids(tmp_path, 2))


def in_launcher(function, ranks: int, *more) -> Process:
    """Starts a process that runs `launcher.run_ranks` and exits with its status."""

    def launch():
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
        sys.exit(launcher.run_ranks(function, ranks, *more))

    process = get_context("fork").Process(target=launch)
    process.start()
    return process


def test_after_an_interrupt_stuck_ranks_are_killed(tmp_path, monkeypatch):
    def stop() -> int:
        note_pid(tmp_path)
        if rank() == 1:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        dist.init_process_group("gloo")
        if rank() == 0:  # as a terminal does
            for pid in (os.getppid(), *pids(tmp_path, 2)):
                os.kill(pid, signal.SIGINT)
        time.sleep(SAFETY_SECONDS)

    monkeypatch.setattr(launcher, "GRACE", 0.5)
    process = in_launcher(stop, 2)
    process.join(SAFETY_SECONDS)
    assert process.exitcode == 128 + signal.SIGINT
    assert wait_until_gone(pids(tmp_path, 2))


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_ranks_that_end_well_after_a_signal_give_status_0(number, tmp_path):
    """The signal of the launcher's process reaches all ranks, and starts none of them again."""

    def end() -> int:
        signal.signal(number, lambda *_: (tmp_path / f"ended {rank()}").touch())
        note_pid(tmp_path)
        dist.init_process_group("gloo")
        if rank() == 0:
            pids(tmp_path, 2)
            os.kill(os.getppid(), number)
        assert wait_until((tmp_path / f"ended {rank()}").exists)
        return 0

    assert launcher.run_ranks(end, 2, max_restarts=1) == 0
    assert len(list(tmp_path.iterdir())) == 4


def test_a_second_signal_kills_ranks_that_ignore_it(tmp_path, monkeypatch):
    def ignore() -> int:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        note_pid(tmp_path)
        pids(tmp_path, 2)
        dist.init_process_group("gloo")
        if rank() == 0:
            while True:  # two signals before the launcher has seen the first are one
                os.kill(os.getppid(), signal.SIGTERM)
                time.sleep(0.05)
        time.sleep(SAFETY_SECONDS)

    monkeypatch.setattr(launcher, "GRACE", 0.1)
    assert launcher.run_ranks(ignore, 2, max_restarts=5) == 128 + signal.SIGTERM
    assert wait_until_gone(pids(tmp_path, 2))


def test_failed_ranks_are_started_again_with_a_store_of_their_own(tmp_path, capfd):
    def fail_twice() -> int:
        attempt = int(os.environ[launcher.ATTEMPT])
        dist.init_process_group("gloo")
        total = torch.tensor([attempt])
        dist.all_reduce(total)
        (tmp_path / f"{attempt}-{rank()}").touch()
        assert total == 2 * attempt and wait_until((tmp_path / f"{attempt}-{1 - rank()}").exists)
        return 0 if attempt == 2 or rank() == 0 else 7

    assert launcher.run_ranks(fail_twice, 2, max_restarts=1) == 7
    assert capfd.readouterr().err == "megarl: restart 1 of at most 1\n"
    assert launcher.run_ranks(fail_twice, 2, max_restarts=5) == 0
    assert launcher.ATTEMPT not in os.environ


def of_node(*flags: str):
    """A node's flags."""
    return launcher._parser().parse_args(["--nnodes", "2", *flags, "train_sft"])


def static(port: int) -> list:
    address = ("--master-addr", "127.0.0.1", "--master-port", str(port))
    return [of_node("--node-rank", str(node), *address) for node in range(2)]


def meet_and_note(folder, end) -> int:
    """Meets the other ranks, notes its parent, and ends with the status of `end()`."""
    start = os.environ[launcher.ATTEMPT]
    dist.init_process_group("gloo", store=dist.PrefixStore(start, next(dist.rendezvous("env://"))[0]),
                            rank=rank(), world_size=4)  # fmt: skip
    total = torch.tensor([rank() + 1])
    dist.all_reduce(total)
    names = map(os.environ.get, ("LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"))
    note = " ".join([str(os.getppid()), str(int(total)), *names])
    (folder / f"{start}-{rank()}.part").write_text(note)
    (folder / f"{start}-{rank()}.part").rename(folder / f"{start}-{rank()}")
    return end()


@pytest.mark.parametrize("numbered", [True, long(False)])
def test_launchers_of_two_nodes_fork_their_ranks_again(numbered, tmp_path):
    """A rank of one fails in the first start; the second start has the same warm parents."""
    port = free_port()
    meeting = of_node("--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "seven")
    end = lambda: 5 if os.environ[launcher.ATTEMPT] == "0" and rank() == 3 else 0  # noqa: E731
    started = [in_launcher(lambda: meet_and_note(tmp_path, end), 2, 1, nodes)
               for nodes in (static(port) if numbered else [meeting] * 2)]  # fmt: skip
    for process in started:
        process.join(SAFETY_SECONDS)
    assert [process.exitcode for process in started] == [0, 0]
    notes = {path.name: path.read_text().split() for path in tmp_path.iterdir()}
    assert notes.keys() == {f"{start}-{number}" for start in range(2) for number in range(4)}
    assert {tuple(note[1:]) for note in notes.values()} == {("10", i, "4", "2", k) for i in "01" for k in "01"}
    parents = [[int(notes[f"{start}-{2 * node + i}"][0]) for start in (0, 1) for i in (0, 1)] for node in (0, 1)]
    if numbered:
        assert parents == [[process.pid] * 4 for process in started]
    else:  # the numbers are those of arrival
        assert {pid for of_one in parents for pid in of_one} == {process.pid for process in started}


@pytest.mark.parametrize(("status", "restarts", "expected"), [
    (2, 3, 2), long((launcher.STOPPED, 3, 3)), long((7, 0, 7)),
])  # fmt: skip
def test_what_ends_one_node_for_good_ends_the_others(status, restarts, expected, tmp_path):
    def end() -> int:
        if rank() == 2:
            return status
        time.sleep(SAFETY_SECONDS)

    started = [in_launcher(lambda: meet_and_note(tmp_path, end), 2, restarts, nodes) for nodes in static(free_port())]
    for process in started:
        process.join(SAFETY_SECONDS)
    assert [process.exitcode for process in started] == [expected] * 2
    assert {path.name for path in tmp_path.iterdir()} == {f"0-{number}" for number in range(4)}


@pytest.mark.long
def test_a_lost_node_is_replaced_by_a_new_launcher(tmp_path, monkeypatch):
    """The launcher of the second node is killed; the first one waits for another with its number."""
    monkeypatch.setattr(rendezvous, "GRACE", 0.1)

    def end() -> int:
        if os.environ[launcher.ATTEMPT] == "1":
            return 0
        dist.barrier()
        raise AssertionError("the other node lives")

    def meet() -> int:
        return meet_and_note(tmp_path, end)

    def stay() -> int:
        return meet_and_note(tmp_path, lambda: time.sleep(SAFETY_SECONDS))

    one, other = static(free_port())
    first, lost = in_launcher(meet, 2, 1, one), in_launcher(stay, 2, 1, other)
    assert wait_until(lambda: len([*tmp_path.glob("0-?")]) == 4)
    lost.kill()
    new = in_launcher(meet, 2, 1, other)
    for process in (first, new):
        process.join(SAFETY_SECONDS)
    assert (first.exitcode, new.exitcode) == (0, 0)
    assert {int((tmp_path / f"1-{number}").read_text().split()[0]) for number in (2, 3)} == {new.pid}


def test_ranks_end_with_their_launcher(tmp_path):
    def stay() -> int:
        note_pid(tmp_path)
        time.sleep(SAFETY_SECONDS)

    process = in_launcher(stay, 2)
    found = pids(tmp_path, 2)
    process.kill()
    process.join()
    assert wait_until_gone(found)


@pytest.mark.usefixtures("own_environment")
@pytest.mark.parametrize("given, threads", [("", 3), ("2", 2)])
def test_ranks_divide_the_cores_and_only_ranks_collect_garbage(given, threads, monkeypatch):
    seen, collects = [], gc.isenabled()
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    monkeypatch.setattr(launcher, "cores", lambda: 7)
    monkeypatch.setattr(launcher, "run", lambda module, flags: seen.append((module, flags, gc.isenabled())) or 0)
    monkeypatch.setattr(launcher, "run_ranks", lambda function, ranks, *_: function() or seen.append(ranks) or 0)
    assert launcher.main(["--nproc-per-node", "2", "evaluate", "--seed", "1"]) == 0
    module = "megarl.evaluate"
    assert seen == [(module, ["--seed", "1", "--check"], False), (module, ["--seed", "1"], True), 2]
    assert os.environ["OMP_NUM_THREADS"] == str(threads) and gc.isenabled() == collects and not gc.get_freeze_count()


@pytest.mark.usefixtures("own_environment")
@pytest.mark.parametrize("node", ["0", "1"])
def test_check_ends_after_the_launchers_own_check(node, monkeypatch):
    seen = []
    monkeypatch.setattr(
        launcher, "run", lambda module, flags: seen.append((flags, CHECKS_FIRST not in os.environ)) or 0
    )
    monkeypatch.setattr(os, "execv", lambda *_: seen.append("torchrun"))
    monkeypatch.setattr(launcher, "run_ranks", lambda *_: seen.append("ranks") or 0)
    flags = ["--seed", "1", "--check"]
    nodes = ["--nnodes", "2", "--nproc-per-node", "2", "--node-rank", node]
    assert launcher.main([*nodes, "evaluate", *flags]) == 0
    assert seen == [(flags, True)]


@pytest.mark.parametrize(("program", "given", "wanted"), [
    ("train_rl", {}, 5), ("train_sft", {}, 5), ("evaluate", {}, 1), ("train_rl", {"OMP_NUM_THREADS": "2"}, 1),
    ("train_rl", {"cores": 1}, 1), ("train_rl", {"nnodes": 2}, 1),
])  # fmt: skip
def test_without_a_number_of_ranks_the_planner_is_asked(program, given, wanted, monkeypatch):
    asked = []
    monkeypatch.setenv("OMP_NUM_THREADS", given.get("OMP_NUM_THREADS", ""))
    monkeypatch.setattr(launcher, "cores", lambda: given.get("cores", 5))
    monkeypatch.setattr(launcher, "can_fork", lambda: True)
    monkeypatch.setattr(launcher, "ranks_for", lambda *call: asked.append(call) or 5)
    options = launcher._parser().parse_args(["--nnodes", str(given.get("nnodes", 1)), program, "--seed", "1"])
    assert launcher._ranks(options) == wanted
    assert asked == ([(["--seed", "1"], program.removeprefix("train_"), 5)] if wanted == 5 else [])


@pytest.mark.parametrize(("flags", "program", "wanted"), [
    (LENGTHS, "rl", 2), ("", "sft", 2), ("", "reward", 2),
    (f"{LENGTHS} --role-map actor=0", "rl", 1), (f"{LENGTHS} --tensor-model-parallel-size 3", "rl", 1),
    ("--no-such-flag 1", "rl", 1), (f"{LENGTHS} --num-layers 4000 --hidden-size 8192 --ffn-hidden-size 28672", "rl", 1),
])  # fmt: skip
def test_one_rank_for_each_core_unless_flags_or_memory_forbid(flags, program, wanted):
    assert launcher.ranks_for([*MODEL.split(), *flags.split()], program, 2) == wanted


def test_every_copy_counts(monkeypatch):
    monkeypatch.setattr(launcher.os, "sysconf", lambda name: 2**12 if name == "SC_PAGE_SIZE" else 2**15)  # 128 MiB
    assert [launcher.ranks_for([*MODEL.split(), *LENGTHS.split()], "rl", cores) for cores in (4, 16)] == [4, 1]


LIST = """import json, sys, megarl.train_rl, megarl.train_sft, megarl.evaluate
import torch
from megarl.mcore.training.optimizer import Adam
weight = torch.nn.Parameter(torch.ones(2))
weight.grad = torch.ones(2)
adam = Adam([weight], 0.1, 0.0, (0.9, 0.99), 1e-8)
adam.step()
adam.load_state_dict(adam.state_dict())
adam.zero_grad()
print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules} | {'torch._dynamo'} & sys.modules.keys())))"""


@pytest.mark.nightly
def test_programs_import_optional_packages_lazily():
    """Nor does an optimizer import torch's compiler."""
    done = subprocess.run([sys.executable, "-c", LIST], env=environment(), capture_output=True, text=True, check=True)
    found = set(json.loads(done.stdout))
    assert {"torch", "megatron", "megarl"} <= found
    assert not found & {
        "torch._dynamo", "reasoning_gym", "matplotlib", "pandas", "scipy", "transformers", "datasets", "sklearn",
        "fastapi", "aiohttp", "math_verify", "antlr4", "wandb", "trl", "vllm", "IPython", "tensorboard", "pyarrow",
    }  # fmt: skip


def test_running_threads_require_torchrun():
    release = threading.Event()
    thread = threading.Thread(target=release.wait)
    thread.start()
    try:
        assert not launcher.can_fork()
    finally:
        release.set()
        thread.join()
    nodes = "--nnodes 2 --node-rank 1 --master-addr here --master-port 29".split()
    meeting = "--nnodes 2 --rdzv-endpoint here:29 --rdzv-id 7".split()
    cases = ([], ["--standalone"]), (nodes, nodes), (meeting, [*meeting, "--rdzv-backend", "c10d"])
    for given, where in cases:
        options = launcher._parser().parse_args([*given, "--nproc-per-node", "3", "train_sft", "--lr", "1", "--nnodes"])
        wanted = ["--nproc-per-node", "3", "-m", "megarl.train_sft", "--lr", "1", "--nnodes"]
        assert launcher.torchrun(options) == ["-m", "megarl.torchrun", *where, *wanted]
