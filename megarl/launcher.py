"""Starts a program on this node's ranks: checks its flags, then forks the ranks or executes torchrun.

    python -m megarl.launcher --nproc-per-node 4 train_rl --config configs/quickstart.yaml

Importing torch and Megatron takes each process seconds. So one process imports them and checks the flags, and the ranks
are forked from it. A forked rank must not inherit a CUDA context or threads: with CUDA, with threads, on systems other
than Linux, and on several nodes, the launcher executes torchrun instead. Ranks get the same environment either way.

Without OMP_NUM_THREADS, the ranks of a node divide its cores among them. torchrun would give each rank one thread,
which leaves cores idle if there are fewer ranks than cores.
"""

import argparse
import contextlib
import ctypes
import gc
import importlib
import logging
import os
import runpy
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from megarl.errors import WARNED

GRACE = 10  # seconds that ranks have to exit after Ctrl-C
PR_SET_PDEATHSIG = 1
THREADS = Path("/proc/self/task")
QUOTA = Path("/sys/fs/cgroup/cpu.max")  # CPU quota of the container: "quota period" in microseconds, or "max period"


def main(argv: list[str]) -> int:
    """Runs a program. Returns its exit status: 2 for wrong flags, else that of the first rank that fails, or 0."""
    options = _parser().parse_args(argv)
    module, ranks = f"megarl.{options.program}", options.nproc_per_node
    os.environ["WORLD_SIZE"] = str(ranks * options.nnodes)
    os.environ["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS") or str(max(1, cores() // ranks))
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # threads of numpy's BLAS would prevent the fork
    gc.disable()  # imports create half a million objects; collecting garbage would take a fifth of the time
    os.environ[WARNED] = "" if options.node_rank in (None, "0") else "1"  # the first node's launcher prints them
    from megarl.data import node_files  # imports numpy

    with node_files.folder_for_ranks():
        if status := run(module, [*options.flags, "--check"]):
            return status
        os.environ[WARNED] = "1"  # the ranks parse the flags again and must not print them
        sys.stdout.flush()
        sys.stderr.flush()
        if options.nnodes == 1 and can_fork():
            if options.program != "evaluate":
                importlib.import_module("torch._dynamo")  # torch imports it for an optimizer: half a second per rank
            gc.freeze()  # the ranks' garbage collector skips the imported objects, too
            gc.enable()
            status = run_ranks(lambda: run(module, options.flags), ranks)
            gc.unfreeze()  # triton's bindings report objects that still exist at exit
            return status
    del os.environ["WORLD_SIZE"]
    os.execv(sys.executable, [sys.executable, *torchrun(options)])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="megarl.launcher", allow_abbrev=False)
    parser.add_argument("--nproc-per-node", type=int, default=1, help="ranks on this node")
    parser.add_argument(
        "--nnodes", type=int, default=1, help="number of nodes; more than one needs the next three flags"
    )
    parser.add_argument("--node-rank")
    parser.add_argument("--master-addr")
    parser.add_argument("--master-port")
    parser.add_argument("program", help="train_rl, train_sft, train_reward or evaluate")
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="flags of the program")
    return parser


def torchrun(options: argparse.Namespace) -> list[str]:
    """Arguments of the Python command that starts the same run with torchrun."""
    rendezvous = ["--standalone"]  # torchrun chooses a free port, so no other job is joined
    if options.nnodes > 1:
        names = ("nnodes", "node_rank", "master_addr", "master_port")
        rendezvous = [text for name in names for text in (f"--{name.replace('_', '-')}", str(getattr(options, name)))]
    ranks = ["--nproc-per-node", str(options.nproc_per_node)]
    return ["-m", "torch.distributed.run", *rendezvous, *ranks, "-m", f"megarl.{options.program}", *options.flags]


def cores() -> int:
    """Cores that this process may use: its CPU affinity, limited by the quota of its container."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):
        quota, period = map(int, QUOTA.read_text().split())
        return max(1, min(affinity, quota // period))
    return affinity


def run(module: str, flags: list[str]) -> int:
    """Runs a module like `python -m` and returns its exit status."""
    sys.argv = [module, *flags]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    return 0


def can_fork() -> bool:
    """Whether forked ranks would work like fresh processes: this process has one thread and no CUDA."""
    import torch

    return not torch.cuda.is_available() and THREADS.exists() and len(list(THREADS.iterdir())) == 1


def run_ranks(function: Callable[[], int], ranks: int) -> int:
    """Forks ranks that connect to a store in this process. Returns 0, or the status of the first rank that fails.

    If a rank fails, torch ends the others with SIGTERM, and after 30 s with SIGKILL. This process forwards a SIGTERM to
    all ranks. If it is killed, they are killed, too.

    Args:
        function: runs on each rank, with the environment of torch's `env://`; returns the exit status.
    """
    from torch.multiprocessing import ProcessExitedException, start_processes

    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)  # it warns for each rank that it ends
    listener = socket.create_server(("127.0.0.1", 0), backlog=ranks)
    context = start_processes(_rank, (ranks, listener, function), ranks, join=False, start_method="fork")
    before = signal.signal(signal.SIGTERM, lambda *_: [process.terminate() for process in context.processes])
    try:
        with _serving(listener, ranks):
            while not context.join():
                pass
    except ProcessExitedException as failure:
        if failure.signal_name:
            print(f"megarl: rank {failure.error_index} was ended by {failure.signal_name}", file=sys.stderr, flush=True)
        return abs(failure.exit_code) + 128 * (failure.exit_code < 0)
    except KeyboardInterrupt:  # the ranks got it, too; torch would wait forever for one that hangs
        deadline = time.monotonic() + GRACE
        try:
            for process in context.processes:
                process.join(max(0, deadline - time.monotonic()))
        finally:
            for process in context.processes:
                process.kill()
        return 128 + signal.SIGINT
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


def _rank(rank: int, ranks: int, listener: socket.socket, function: Callable[[], int]):
    """Turns this process into a rank with torchrun's environment and runs it."""
    # SIGKILL replaces torch's SIGINT, which a rank inside a collective ignores.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(listener.getsockname()[1]), TORCHELASTIC_USE_AGENT_STORE="True",
    )  # fmt: skip
    listener.close()
    try:
        status = function()
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
    except Exception:  # torch would report only the first rank, and only after all have ended
        traceback.print_exc()
        status = 1
    sys.exit(status)


@contextlib.contextmanager
def _serving(listener: socket.socket, ranks: int):
    """Runs the ranks' store. It has threads, so it starts after the forks; early ranks wait for the connection."""
    from torch.distributed import TCPStore

    host, port = listener.getsockname()
    store = TCPStore(host, port, ranks, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    yield
    del store


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
