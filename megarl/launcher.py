"""Starts a program on this node's ranks: checks its flags, then forks the ranks or executes torchrun.

    python -m megarl.launcher --nproc-per-node 4 train_rl --config configs/quickstart.yaml

Importing torch and Megatron takes each process seconds. So one process imports them and checks the flags, and the ranks
are forked from it, again after a failure. A forked rank must not inherit a CUDA context or threads: with CUDA, with
threads, and on systems other than Linux the launcher executes torchrun instead. Ranks get the same environment either
way.

On several nodes each launcher forks its own ranks (`cluster/rendezvous.py` says how they meet). One whose ranks have
failed says so in the store, and all of them start again together. One that begins later, for a node that was lost,
joins the next start.

Without OMP_NUM_THREADS, the ranks of a node divide its cores among them. torchrun would give each rank one thread,
which leaves cores idle if there are fewer ranks than cores. Without a number of ranks, too, training has one for each
core, as far as memory allows (`ranks_for`).
"""

import argparse
import contextlib
import gc
import os
import re
import runpy
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing import connection
from pathlib import Path

from megarl import child_process
from megarl.child_process import STOP_SIGNALS
from megarl.cluster.cpu_cores import cores
from megarl.cluster.slurm import ATTEMPT
from megarl.errors import CHECKS_FIRST, STOPPED, WARNED, UsageError
from megarl.faults import last_line

GRACE = 10  # seconds that ranks have to exit after a second signal
WRONG_FLAGS = 2  # exit status
PROGRAMS = ("train_rl", "train_sft", "train_reward", "train_preference", "evaluate", "serve", "replay", "generate")
THREADS = Path("/proc/self/task")
LOOK = 0.2  # seconds between two questions whether another node has failed
BYTES_PER_WEIGHT = 24  # of a trained model in fp32: weights, gradients, moments, and activations of the same order
MAX_SHARE = 0.4  # of the node's memory that all copies of the models may take


def main(argv: list[str]) -> int:
    """Runs a program. Returns its exit status: 2 for wrong flags, else that of the first rank that fails, or 0."""
    options = _parser().parse_args(argv)
    if options.program not in PROGRAMS:
        print(f"megarl: error: {options.program}: unknown program; allowed: {', '.join(PROGRAMS)}", file=sys.stderr)
        return WRONG_FLAGS
    module = f"megarl.{options.program}"
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # threads of numpy's BLAS would prevent the fork
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin while they wait take the cores of others
    if options.program == "serve":
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the check's threads would prevent the fork
    gc.disable()  # imports create half a million objects; collecting garbage would take a fifth of the time
    ranks = options.nproc_per_node = options.nproc_per_node or _ranks(options)
    os.environ.pop(last_line.SAVE, None)
    for name in ("RANK", "LOCAL_RANK"):  # of a shell or a container, where they may number nodes; ranks get their own
        os.environ.pop(name, None)
    os.environ |= {"WORLD_SIZE": str(ranks * options.nnodes), "LOCAL_WORLD_SIZE": str(ranks)}
    os.environ["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS") or str(max(1, cores() // ranks))
    os.environ[WARNED] = "" if options.node_rank in (None, "0") else "1"  # the first node's launcher prints them
    from megarl.data import node_files  # imports numpy

    with node_files.folder_for_ranks():
        is_check = "--check" in options.flags
        if not is_check:
            os.environ[CHECKS_FIRST] = "1"  # it prints no summary
        status = run(module, options.flags if is_check else [*options.flags, "--check"])
        if is_check or status:
            return status
        del os.environ[CHECKS_FIRST]
        os.environ[WARNED] = "1"  # the ranks parse the flags again and must not print them
        sys.stdout.flush()
        sys.stderr.flush()
        if can_fork():
            gc.freeze()  # the ranks' garbage collector skips the imported objects, too
            gc.enable()
            nodes = options if options.nnodes > 1 else None
            try:
                status = run_ranks(lambda: run(module, options.flags), ranks, options.max_restarts, nodes)
            except UsageError as error:  # the nodes cannot meet
                print(f"megarl: error: {error}", file=sys.stderr)
                status = WRONG_FLAGS
            gc.unfreeze()  # triton's bindings report objects that still exist at exit
            return status
    del os.environ["WORLD_SIZE"], os.environ["LOCAL_WORLD_SIZE"]
    os.execv(sys.executable, [sys.executable, *torchrun(options)])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="megarl.launcher", allow_abbrev=False)
    parser.add_argument(
        "--nproc-per-node", type=int, help="ranks on this node; default: on CPUs one a core if they fit, else 1"
    )
    parser.add_argument(
        "--nnodes", type=int, default=1, help="number of nodes; more than one needs the next three flags, or --rdzv-…"
    )
    parser.add_argument("--node-rank")
    parser.add_argument("--master-addr")
    parser.add_argument("--master-port")
    parser.add_argument("--rdzv-endpoint", help="HOST:PORT where the nodes meet and number themselves (c10d)")
    parser.add_argument("--rdzv-id", default="megarl", help="name of the job at that endpoint")
    parser.add_argument(
        "--max-restarts", type=int, default=0, help="start the ranks again after a failure, at most so often"
    )
    parser.add_argument("program", help=", ".join(PROGRAMS))
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="flags of the program")
    return parser


def _ranks(options: argparse.Namespace) -> int:
    trains = options.program.startswith("train_")
    if not trains or options.nnodes > 1 or cores() == 1 or os.environ.get("OMP_NUM_THREADS"):
        return 1
    program = options.program.removeprefix("train_")
    ranks = ranks_for(options.flags, program, cores())
    ranks = ranks if ranks > 1 and can_fork() else 1  # asked last: it loads torch
    if "--check" not in options.flags:
        what = f"{ranks} ranks of one thread" if ranks > 1 else f"one rank of {cores()} threads"
        print(f"megarl: {what} (NPROC or OMP_NUM_THREADS choose otherwise)", file=sys.stderr, flush=True)
    return ranks


def ranks_for(flags: list[str], program: str, cores: int) -> int:
    """`cores` data-parallel ranks of one thread: they also divide what threads cannot. 1 rank for flags that place
    roles or split a model, for flags that are wrong, and for models whose copies would not fit into memory."""
    from megarl import arguments

    try:
        config = arguments.parse(flags, cores, program)
    except UsageError:
        return 1
    from megarl.mcore import device  # after the flags: they import torch
    from megarl.planning.parameters import parameter_totals

    if device.has_cuda() or config.settings.role_map:
        return 1
    weights = sum(parameter_totals(role.megatron, 1, value_head=False).total for role in config.with_models())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return cores if weights * BYTES_PER_WEIGHT * cores <= MAX_SHARE * memory else 1


def torchrun(options: argparse.Namespace) -> list[str]:
    """Arguments of the Python command that starts the same run with torchrun."""
    rendezvous = ["--standalone"]  # torchrun chooses a free port, so no other job is joined
    if options.nnodes > 1:
        static, meeting = ("node_rank", "master_addr", "master_port"), ("rdzv_endpoint", "rdzv_id")
        names = ("nnodes", *(meeting if options.rdzv_endpoint else static))
        rendezvous = [text for name in names for text in (f"--{name.replace('_', '-')}", str(getattr(options, name)))]
        rendezvous += ["--rdzv-backend", "c10d"] if options.rdzv_endpoint else []
    ranks = ["--nproc-per-node", str(options.nproc_per_node)]
    if options.max_restarts:
        ranks += ["--max-restarts", str(options.max_restarts)]
    return ["-m", "megarl.torchrun", *rendezvous, *ranks, "-m", f"megarl.{options.program}", *options.flags]


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


def run_ranks(function: Callable[[], int], ranks: int, max_restarts: int = 0, nodes=None) -> int:
    """Forks ranks that connect to a store in this process. Returns 0, or the status of the first rank that fails.

    If a rank fails, the others are killed. SIGTERM, SIGINT and SIGUSR1 are passed on to all ranks, which may end their
    step and exit with 0; `GRACE` seconds after a second one the ranks are killed. If this process is killed, they are
    killed, too.

    Args:
        function: runs on each rank, with the environment of torch's `env://`; returns the exit status.
        max_restarts: how often all ranks are started again after one failed; not after wrong flags, a signal, or a
            limit of the run that was reached.
        nodes: the flags about nodes, of which this is one; None: it is the only one.

    Raises:
        UsageError: these flags are wrong, or the nodes did not meet.
    """
    from megarl.cluster import rendezvous  # imports torch

    attempt = -1
    with contextlib.ExitStack() as stack:
        stack.callback(os.environ.pop, ATTEMPT, None)
        announcer = None if nodes is None else rendezvous.announcer(nodes)
        if announcer is not None:
            stack.enter_context(announcer)
        while True:
            environment, listener = rendezvous.next_start(ranks, nodes, announcer, attempt + 1)
            os.environ[ATTEMPT], attempt = environment[ATTEMPT], int(environment[ATTEMPT])
            status, is_final = _run_once(function, ranks, environment, listener, announcer)
            if is_final or attempt >= max_restarts:
                return status
            print(f"megarl: restart {attempt + 1} of at most {max_restarts}", file=sys.stderr, flush=True)


def _run_once(function: Callable[[], int], ranks: int, environment: dict, listener, announcer) -> tuple[int, bool]:
    """Runs all ranks once: exit status, and whether that is the end. Arguments as of `next_start`."""
    from torch.multiprocessing import start_processes

    from megarl.cluster import rendezvous

    first, size = int(environment["GROUP_RANK"]) * ranks, int(environment["WORLD_SIZE"])
    with tempfile.TemporaryDirectory(prefix="megarl_errors_") as errors:
        arguments = (environment, [listener, announcer], errors, function)
        context = start_processes(_rank, arguments, ranks, join=False, start_method="fork")
        signals = _Signals(context.processes)
        try:
            with _store_of(environment, listener, announcer) as store:
                ended = _wait(context.processes, store if size > ranks else None)
                failures = [last_line.read(first + rank, code, _error_file(errors, rank)) for rank, code in ended]
                cause = last_line.cause(failures)
                status = cause.exit_status if cause else 0
                if len(signals.received) > 1 and status:
                    status = 128 + signals.received[-1]
                is_final = status in (0, WRONG_FLAGS, STOPPED) or bool(signals.received)
                if size > ranks:
                    status, is_final = rendezvous.agree(store, environment, (status, is_final), signals)
        finally:
            signals.release()
            for process in context.processes:
                process.kill()
            for process in context.processes:
                process.join(GRACE)  # what it prints comes before the last line
    if not signals.received:
        last_line.tell(failures, how_to_resume, repeats=len(failures) > 1)
    return status, is_final


def how_to_resume(folder: str) -> str:
    """As `checkpoint.folders.how_to_resume`, which imports torch."""
    from megarl.checkpoint import folders, host_memory

    host_memory.attach(folder, only_whole=True)
    return folders.how_to_resume(folder)


def tell_killed(status: str, folder: str, output: str):
    """The last line after srun, if a task was killed, which can tell nobody: how to go on.

    Args:
        status: of srun, above 128.
        folder: that the run saves to; "" if it saves nothing.
        output: the file of what srun has printed.
    """
    text = Path(output).read_text(encoding="utf-8", errors="replace")
    if found := re.search(r"^srun: error: .*\btasks? (\d+).*: (Killed|Out Of Memory)$", text, re.MULTILINE):
        os.environ[last_line.SAVE] = folder
        last_line.tell([last_line.Failure(int(found[1]), 128 - int(status), None)], how_to_resume)


def _error_file(folder: str, rank: int) -> Path:
    return Path(folder) / f"{rank}.json"


class _Signals:
    """Passes this process's signals on to the ranks."""

    def __init__(self, processes: list):
        self._processes, self.received = processes, []
        self._before = {signal.SIGALRM: signal.getsignal(signal.SIGALRM)}
        self._before |= {number: signal.signal(number, self._pass_on) for number in STOP_SIGNALS}

    def _pass_on(self, number: int, frame):
        self.received.append(number)
        for process in self._processes:
            if process.exitcode is None:
                os.kill(process.pid, number)
        if len(self.received) == 2:
            signal.signal(signal.SIGALRM, self._kill)
            signal.setitimer(signal.ITIMER_REAL, GRACE)

    def _kill(self, number: int, frame):
        for process in self._processes:
            process.kill()

    def release(self):
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._before.items():
            signal.signal(number, handler)


def _wait(processes: list, store=None) -> list[tuple[int, int]]:
    """Waits for all ranks; kills them when one fails. Returns rank and exit code (minus a signal) of the first that
    fails and of those that have failed by then. `store`: of several nodes; none is returned if another one has failed.
    """
    from megarl.cluster import rendezvous

    running = {process.sentinel: (rank, process) for rank, process in enumerate(processes)}
    while running:
        ended = connection.wait(list(running), None if store is None else LOOK)
        if store is not None and not ended and rendezvous.has_failed(store):
            for process in processes:
                process.kill()
            return []
        for sentinel in ended:
            rank, process = running.pop(sentinel)
            process.join()
            if process.exitcode:
                codes = {rank: process.exitcode} | {i: other.exitcode for i, other in enumerate(processes)}
                for other in processes:
                    other.kill()
                for other in processes:
                    other.join(GRACE)  # the store is open so long: it tells a rank that another one failed first
                return [(rank, code) for rank, code in codes.items() if code]
    return []


def _rank(rank: int, environment: dict[str, str], sockets: list, errors: str, function: Callable[[], int]):
    """Turns this process into a rank with torchrun's environment and runs it."""
    child_process.die_with_parent()  # SIGKILL replaces torch's SIGINT, which a rank inside a collective ignores
    first = int(environment["GROUP_RANK"]) * int(environment["LOCAL_WORLD_SIZE"])
    os.environ |= environment | {"RANK": str(first + rank), "LOCAL_RANK": str(rank)}
    os.environ[last_line.ERROR_FILE] = str(_error_file(errors, rank))
    for each in filter(None, sockets):
        each.close()
    try:
        status = function()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal and the launcher both send one
        status = 128 + signal.SIGINT
    except Exception:  # torch would report only the first rank, and only after all have ended
        traceback.print_exc()
        status = 1
    sys.exit(status)


@contextlib.contextmanager
def _store_of(environment: dict[str, str], listener: socket.socket | None, announcer: socket.socket | None):
    """The ranks' store, which the launcher of the first node serves.

    It has threads, so it starts after the forks; early ranks wait for the connection.
    """
    from torch.distributed import TCPStore

    from megarl.cluster import rendezvous

    host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    if listener is None:
        yield rendezvous.connected(host, port)
        return
    store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    with contextlib.nullcontext() if announcer is None else rendezvous.announced_start(environment, announcer):
        yield store
    del store


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
