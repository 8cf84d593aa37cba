"""Starts a program on this node's ranks: checks its flags, then forks the ranks or hands over to torchrun.

    python -m megarl.launcher --nproc-per-node 4 train_rl --config configs/quickstart.yaml

Importing torch and Megatron costs a process seconds. Here one process imports them, checks the flags, and the ranks are
forked from it. A fork must not inherit a CUDA context or threads, and knows this machine alone: with either, on other
systems than Linux, and on several nodes, torchrun takes over. The ranks see the same variables in both ways.

Where OMP_NUM_THREADS is not set the ranks of a node share its cores out. torchrun gives each one thread, since more
threads than cores wait for each other; with fewer ranks than cores that leaves cores idle.
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

GRACE = 10  # seconds that ranks have to end after Ctrl-C
PR_SET_PDEATHSIG = 1
THREADS = Path("/proc/self/task")
QUOTA = Path("/sys/fs/cgroup/cpu.max")  # microseconds of processor time in so many of the clock, or max


def main(argv: list[str]) -> int:
    """Runs a program; the exit status is 2 for wrong flags, told in one line, else that of the first rank to fail."""
    options = _parser().parse_args(argv)
    module, ranks = f"megarl.{options.program}", options.nproc_per_node
    os.environ["WORLD_SIZE"] = str(ranks * options.nnodes)
    os.environ["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS") or str(max(1, cores() // ranks))
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's, which has little to do, would forbid the fork
    gc.disable()  # imports leave half a million objects: to look for garbage among them takes a fifth of the time
    os.environ[WARNED] = "" if options.node_rank in (None, "0") else "1"  # the first node's launcher prints them
    if status := run(module, [*options.flags, "--check"]):
        return status
    os.environ[WARNED] = "1"  # not once more by the ranks, which read the flags again
    sys.stdout.flush()
    sys.stderr.flush()
    if options.nnodes == 1 and can_fork():
        if options.program != "evaluate":
            importlib.import_module("torch._dynamo")  # half a second, in every rank, where torch makes an optimizer
        gc.freeze()  # and so in the ranks, for good: what all of them have is never looked through again
        gc.enable()
        status = run_ranks(lambda: run(module, options.flags), ranks)
        gc.unfreeze()  # triton's bindings report what is left behind
        return status
    del os.environ["WORLD_SIZE"]
    os.execv(sys.executable, [sys.executable, *torchrun(options)])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="megarl.launcher", allow_abbrev=False)
    parser.add_argument("--nproc-per-node", type=int, default=1, help="ranks of this node")
    parser.add_argument("--nnodes", type=int, default=1, help="nodes; of several, torchrun wants the next three")
    parser.add_argument("--node-rank")
    parser.add_argument("--master-addr")
    parser.add_argument("--master-port")
    parser.add_argument("program", help="train_rl, train_sft, train_reward or evaluate")
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="the program's")
    return parser


def torchrun(options: argparse.Namespace) -> list[str]:
    """Python's arguments that start the same by torchrun."""
    where = ["--standalone"]  # a free port of torchrun's choosing: nobody else's job is joined
    if options.nnodes > 1:
        names = ("nnodes", "node_rank", "master_addr", "master_port")
        where = [text for name in names for text in (f"--{name.replace('_', '-')}", str(getattr(options, name)))]
    ranks = ["--nproc-per-node", str(options.nproc_per_node)]
    return ["-m", "torch.distributed.run", *where, *ranks, "-m", f"megarl.{options.program}", *options.flags]


def cores() -> int:
    """Cores that this process may use: those that it is bound to, and no more than its container is given."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):
        given, period = map(int, QUOTA.read_text().split())
        return max(1, min(bound, given // period))
    return bound


def run(module: str, flags: list[str]) -> int:
    """A module as `python -m` runs it; its exit status."""
    sys.argv = [module, *flags]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def can_fork() -> bool:
    """Whether this process is one thread without CUDA, so that a forked rank can do all that a fresh one could."""
    import torch

    return not torch.cuda.is_available() and THREADS.exists() and len(list(THREADS.iterdir())) == 1


def run_ranks(function: Callable[[], int], ranks: int) -> int:
    """Forks ranks that meet at a store of this process; exit status 0, or that of the first rank to fail.

    When one fails torch ends the others: by SIGTERM, and by SIGKILL those that are still there 30 s later. SIGTERM is
    passed on to all ranks. When this process is killed they end with it.

    Args:
        function: what each rank runs, with the variables of torch's `env://`; returns its exit status.
    """
    from torch.multiprocessing import ProcessExitedException, start_processes

    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)  # it warns of each rank that it ends
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
    except KeyboardInterrupt:  # the terminal has sent it to the ranks, too; torch would wait for stuck ones for ever
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
    """Makes this process that rank, as torchrun would, and runs it."""
    # Against torch's SIGINT, which a rank inside a collective does not act on.
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
    except Exception:  # torch would tell of the first rank alone, once all have ended
        traceback.print_exc()
        status = 1
    sys.exit(status)


@contextlib.contextmanager
def _serving(listener: socket.socket, ranks: int):
    """The store at which the ranks meet. It has threads, so it comes after the forks; early ranks wait to connect."""
    from torch.distributed import TCPStore

    host, port = listener.getsockname()
    store = TCPStore(host, port, ranks, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    yield
    del store


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
