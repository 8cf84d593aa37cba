"""Worlds of ranks for tests: a function runs on several processes, forked from the warm test process, over gloo."""

import contextlib
import ctypes
import faulthandler
import functools
import gc
import importlib
import inspect
import os
import pickle
import random
import signal
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing import connection, get_context
from pathlib import Path

import torch
import torch.distributed as dist

from tests.helpers.waiting import SAFETY_SECONDS, wait_until

PR_SET_PDEATHSIG = 1
MADV_COLLAPSE = 25
HUGE_PAGE = 2**21  # bytes
SAFETY = timedelta(seconds=SAFETY_SECONDS)
# What programs import only where they need it.
LATE_IMPORTS = (
    "torch._dynamo", "torch.utils.tensorboard", "numpy.ma", "megatron.core.models.mimo",
    "megatron.core.dist_checkpointing.strategies.cached_metadata_filesystem_reader",
    "megarl.mcore.model.layer_specs.local", "megarl.train_rl", "megarl.train_sft", "megarl.train_reward",
    "megarl.train_preference", "megarl.trainers.rl_trainer", "megarl.trainers.sft_trainer",
    "megarl.trainers.preference_trainer", "megarl.trainers.evaluation_program", "megarl.trainers.policy",
    "megarl.extras.report", "megarl.rewards.text",
    "transformers.models.auto.configuration_auto", "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.configuration_llama",  # with what configurations of all models import
)  # fmt: skip


class RankFailed(AssertionError):
    """A rank raised, died or did not answer in time; the message names the rank and says where."""


def run_world(function, size: int, *args, timeout: float = SAFETY_SECONDS) -> list:
    """Runs `function(rank, *args)` on `size` ranks that share a gloo group; returns its results by rank.

    The ranks are forked: importing torch and Megatron costs seconds, a fork milliseconds. Arguments are inherited,
    results are pickled (tensors on the CPU are fine). Every process is killed before the call returns. What ranks wait
    for in collectives has SAFETY as its limit, whatever `timeout` says.

    Raises:
        RankFailed: a rank raised (with its traceback), ended early, or had no result after `timeout` seconds (with
            the stacks of all that had none). The first failure counts; the other ranks are killed.
    """
    warm()
    if dist.is_initialized():
        raise RuntimeError("the test process is in a distributed group: worlds cannot be forked from it")
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        try:
            for rank in range(size):
                ranks.append(_Rank(rank, size, Path(folder), function, args))
            return _collect(ranks, time.monotonic() + timeout)
        finally:
            for rank in ranks:
                rank.kill()


def on_each_rank(size: int = 1):
    """Makes a test of a function of a rank, and of parameters and fixtures, in which each rank of a world asserts."""

    def decorate(function):
        @functools.wraps(function)
        def test(**arguments):
            run_world(functools.partial(function, **arguments), size)

        signature = inspect.signature(function)
        given = [*signature.parameters.values()][1:]
        test.__signature__ = signature.replace(parameters=given)  # type: ignore[attr-defined]  # pytest reads it
        return test

    return decorate


@functools.cache
def warm():
    """Does once in the test process what each forked rank would do again: imports, and the first parse of flags."""
    gc.disable()  # as in conftest.py
    for name in LATE_IMPORTS:
        importlib.import_module(name)
    from megarl import arguments
    from megarl.checkpoint import manifest
    from megarl.observe import settings_file

    flags = "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --prompts x --max-prompt-length 1"
    flags += " --max-response-length 1 --tokenizer-model x --lr 1 --critic-lr 1 --minibatch-size 1 --prompts-per-step 1"
    arguments.parse(flags.split(), 1)
    settings_file.environment("cpu")  # versions, and git's answer
    manifest.versions()
    dist.BackendConfig(dist.Backend("gloo"))  # torch looks through all installed packages for it, once
    gc.collect()
    gc.freeze()
    gc.enable()
    _collapse_memory()


def _collapse_memory():
    """Moves this process's memory into huge pages where Linux can: a fork copies one entry for each page, and its end
    removes them, which took 30 ms."""
    if sys.platform != "linux":
        return
    madvise = ctypes.CDLL(None).madvise
    for line in Path("/proc/self/maps").read_text().splitlines():
        where, mode, _, _, inode, *name = line.split()
        first, end = (int(address, 16) for address in where.split("-"))
        first, end = -(-first // HUGE_PAGE) * HUGE_PAGE, end // HUGE_PAGE * HUGE_PAGE
        if mode == "rw-p" and inode == "0" and name != ["[stack]"] and first < end:
            madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), MADV_COLLAPSE)


class _Rank:
    """The parent's end of one rank."""

    def __init__(self, rank: int, size: int, folder: Path, function, args):
        self.name = f"rank {rank} of {size}"
        self.stack = folder / f"stack-{rank}"
        self.reader, writer = connection.Pipe(duplex=False)
        target = (writer, rank, size, folder, function, args)
        self.process = get_context("fork").Process(target=_child, args=target)
        self.process.start()
        writer.close()  # before the next fork: a sibling that holds it would hide this rank's end
        with contextlib.suppress(OSError):
            os.setpgid(self.process.pid, self.process.pid)  # the child does it, too: whoever comes first

    def result(self):
        """The rank's result; RankFailed if it raised or ended."""
        try:
            raised, payload = pickle.loads(self.reader.recv_bytes())
        except EOFError:
            self.process.join(SAFETY_SECONDS)
            raise RankFailed(f"{self.name} ended with exit code {self.process.exitcode}") from None
        if raised:
            raise RankFailed(f"{self.name} raised:\n{payload}")
        return payload

    def where(self) -> str:
        """Stack of a rank that does not answer."""
        os.kill(self.process.pid, signal.SIGUSR2)
        # A stack ends with its outermost frame, which is the parent's, too, or with dots where it is very deep.
        last = (f" in {traceback.extract_stack()[0].name}\n", "  ...\n")
        wait_until(lambda: self.stack.read_text().endswith(last) or not self.process.is_alive())
        return f"{self.name}:\n{self.stack.read_text()}"

    def kill(self):
        """Ends the rank with all processes that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join()
        self.process.close()
        self.reader.close()


def _collect(ranks: list[_Rank], deadline: float) -> list:
    results, waiting = {}, {rank.reader: rank for rank in ranks}
    while waiting:
        ready = connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            stacks = "\n".join(rank.where() for rank in waiting.values())
            raise RankFailed(f"no result in time from {len(waiting)} rank(s):\n{stacks}")
        for reader in ready:
            rank = waiting.pop(reader)  # type: ignore[call-overload]  # the type of `wait` is wider
            results[rank] = rank.result()
    return [results[rank] for rank in ranks]


def die_with_parent():
    """Ends this process with the test process, however that ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _child(writer, rank: int, size: int, folder: Path, function, args):
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    die_with_parent()
    with open(folder / f"stack-{rank}", "w") as stack:
        faulthandler.register(signal.SIGUSR2, file=stack, all_threads=False)
        try:
            answer = (False, _run(rank, size, folder, function, args))
            message = pickle.dumps(answer)
        except BaseException as error:
            if isinstance(error, SystemExit):
                raise
            message = pickle.dumps((True, traceback.format_exc()))
        writer.send_bytes(message)
        # The parent kills this rank when all are done: until then siblings may still talk to it.
        signal.pause()


def _run(rank: int, size: int, folder: Path, function, args):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=SAFETY)
    return function(rank, *args)


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_until_gone(pids) -> bool:
    """Whether all of these processes end."""
    return wait_until(lambda: not any(map(alive, pids)))
