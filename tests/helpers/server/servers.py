"""Generation servers of small policies, started as users do, and the engine in this process to compare with."""

import contextlib
import functools
import os
import re
import signal
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import urllib3

from megarl import launcher
from megarl.algorithms.token_sampling import SamplingSettings
from megarl.mcore.inference.generation import GenerationRequest
from tests.helpers.evaluation import MODEL
from tests.helpers.programs import inputs, program, sft_argv, train
from tests.helpers.worlds import SAFETY_SECONDS, run_world, wait_until

LONG = (
    " --position-embedding-type rope --max-prompt-length 16 --max-response-length 112 --max-tokens-per-microbatch 256"
)
SERVED = LONG.replace(" --max-tokens-per-microbatch 256", "") + " --rollout-buffer-gb 0.004 --rollout-max-requests 64"
MOE = LONG + " --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32"
API_KEY, ADMIN_KEY = "a-key-of-the-tests-0", "an-admin-key-of-the-tests"
ANNOUNCED = re.compile(r"megarl: serving (\S+) at (\S+)")


def serve_argv(flags: str = "", load: Path | None = None) -> list[str]:
    """Command line of a server of the warm start on a free port; `flags` win over the defaults."""
    files = {"--tokenizer-model": inputs() / "tokenizer.model", "--load": load or inputs() / "sft"}
    return [*MODEL.split(), *(str(item) for pair in files.items() for item in pair), "--port", "0", *flags.split()]


@functools.cache
def checkpoint(flags: str = LONG, steps: int = 2) -> Path:
    """The run folder of a policy that writes long responses: hardly trained, a checkpoint for each step."""
    save = inputs() / ("served-experts" if "experts" in flags else "served")
    train("sft", sft_argv(save, f"{flags} --train-iters {steps} --save-interval 1 --lr 0.02 --lr-warmup-iters 0"))
    return save


@functools.cache
def small_argv(flags: str = "") -> list[str]:
    """Command line of a server of that policy."""
    return serve_argv(f"{SERVED} {flags}", checkpoint())


@functools.cache
def key_files() -> dict[str, str]:
    for name, key in (("api", API_KEY), ("admin", ADMIN_KEY)):
        (inputs() / f"{name}.keys").write_text(f"\n{key}\n")
    return {name: str(inputs() / f"{name}.keys") for name in ("api", "admin")}


@functools.cache
def requests(count: int = 24) -> list[GenerationRequest]:
    """Requests with settings, lengths, end tokens and top log-probs of their own."""
    settings = [SamplingSettings(), SamplingSettings(0.7), SamplingSettings(top_k=3), SamplingSettings(greedy=True),
                SamplingSettings(1.2, 0, 0.8), SamplingSettings(min_p=0.3)]  # fmt: skip
    return [
        GenerationRequest(
            [3 + i % 9, 4, 5 + i % 7], i - 5, 5 + 3 * i, settings[i % 5], ((), (3,), (2, 7))[i % 3], i % 4
        )
        for i in range(count)
    ]


class ForkedLauncher:
    """The launcher in a fork of this process, which has imported torch already; with `Popen`'s methods."""

    def __init__(self, argv: list[str], log: Path):
        """`log`: receives standard error; `stdout` reads standard output."""
        read, write = os.pipe()
        self._process = get_context("fork").Process(target=_become_launcher, args=(argv, log, read, write))
        self._process.start()
        os.close(write)
        self.pid, self.stdout = self._process.pid, os.fdopen(read)

    def poll(self) -> int | None:
        """The exit status, negative after a signal; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """The exit status, once it has ended; AssertionError after `timeout` seconds."""
        self._process.join(timeout)
        assert self._process.exitcode is not None, f"still running after {timeout:g} s"
        return self._process.exitcode

    def send_signal(self, number: int):
        """Sends a signal to the launcher alone."""
        os.kill(self.pid, number)

    def kill(self):
        """Ends it with all processes that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait()
        self.stdout.close()


def _become_launcher(argv: list[str], log: Path, unused: int, output: int):
    os.setsid()
    os.close(unused)
    os.dup2(output, 1)
    os.dup2(os.open(log, os.O_CREAT | os.O_WRONLY), 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    sys.exit(launcher.main(argv))


class Served(NamedTuple):
    url: str
    model: str
    process: ForkedLauncher
    log: Path  # standard error

    def get(self, path: str, **headers: str) -> urllib3.BaseHTTPResponse:
        return urllib3.request("GET", self.url + path, headers=headers, timeout=SAFETY_SECONDS, retries=False)

    def post(self, path: str, body=None, **headers: str) -> urllib3.BaseHTTPResponse:
        return urllib3.request(
            "POST", self.url + path, json=body, headers=headers, timeout=SAFETY_SECONDS, retries=False
        )

    def free_blocks(self) -> float:
        """Free blocks of the caches of all replicas."""
        text = self.get("/metrics").data.decode()
        return sum(float(value) for value in re.findall(r"^megarl_free_cache_blocks\{.*\} (\S+)$", text, re.MULTILINE))

    def stop(self) -> int:
        """Ends the server as a launcher does; returns its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(SAFETY_SECONDS)


@contextlib.contextmanager
def served(argv: list[str], size: int = 1) -> Iterator[Served]:
    """A server that is ready; it is stopped at the end, and must then exit with 0 unless it was ended before."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        process = ForkedLauncher(["--nproc-per-node", str(size), "serve", *argv], log)
        try:
            found = next(filter(None, map(ANNOUNCED.match, process.stdout)), None)
            assert found, f"the server ended with {process.wait()}: {log.read_text()}"
            server = Served(found[2], found[1], process, log)
            assert wait_until(lambda: process.poll() is not None or server.get("/ready").status == 200)
            assert process.poll() is None, log.read_text()
            yield server
            if process.poll() is None:
                assert server.stop() == 0, log.read_text()
        finally:
            process.kill()


def engine_of(argv: list[str], size: int = 1):
    """(rollout engine, its model, role groups, inputs) of a server's command line on `size` ranks; for worlds."""
    from megarl.observe.timers import Timers
    from megarl.rollout.rollout import Rollout
    from megarl.trainers.policy import PolicyInputs
    from megarl.trainers.setup import read_inputs

    config, timers = program("serve", argv, size), Timers()
    policy_inputs, mesh, _ = read_inputs(config, timers, lambda: PolicyInputs(config), sys.stderr)
    policy = policy_inputs.load(mesh["actor"])
    rollout = Rollout(config.settings, policy_inputs.rollout_role(), mesh, policy, policy_inputs.tokenizer, timers)
    return rollout.engine, rollout.model, mesh["rollout"], policy_inputs


def _completions(rank: int, argv: list[str], requests: list, size: int, routes: bool):
    from megarl.serving.served_engine import ServedEngine
    from tests.helpers.rollout.served_engines import generate

    engine, _, _, policy_inputs = engine_of(argv, size)
    return generate(ServedEngine(engine, policy_inputs.tokenizer.end_ids, routes), requests)


def completions(argv: list[str], requests: list, size: int = 1, routes: bool = False) -> list:
    """What the engine of a server's command line answers on so many ranks."""
    return run_world(_completions, size, argv, requests, size, routes)[0]


def _scores(rank: int, argv: list[str], sequences: list, size: int):
    from megarl.serving.replica_messages import ScorePrompt
    from megarl.serving.served_engine import score_sequences

    _, model, groups, policy_inputs = engine_of(argv, size)
    requests = [ScorePrompt(tokens, 1.0, 2) for tokens in sequences]
    return score_sequences(model, groups.pg_collection, policy_inputs.vocab_size, requests)


def scores(argv: list[str], sequences: list, size: int = 1) -> list:
    """Log-probs of token sequences, of the same command line, on so many ranks."""
    return run_world(_scores, size, argv, sequences, size)[0]
