"""The generation server under load, against the engine's own throughput and vLLM's server, on the same model.

    PYTHONPATH=. python tools/bench/serving.py --hf-model DIR [--clients 64] [--tokens 48] [--rounds 3] [--threads 2]
        [--vllm-python INTERPRETER] [--json FILE] [--markdown]

Each of the clients sends one prompt of 16 to 22 random tokens to /v1/completions as a stream, all at once, and gets
`--tokens` tokens at temperature 1 without an end token. `engine` generates the same requests by a call in its own
process. The sides take turns in each round; the others are loaded and idle then. Reported: tokens per second from the
first request to the last answer, and over all requests the seconds to the first token and between two tokens.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import urllib3

ANNOUNCED = re.compile(r"megarl: serving (\S+) at http://(\S+):(\d+)")
SLOWEST_START = 600  # seconds until a server is ready
LONGEST_PROMPT = 22


class Load(NamedTuple):
    """One round of a server: all measured times in seconds."""

    seconds: float
    first: list[float]  # to the first token of each request
    between: list[float]  # two tokens of a request


class Server(NamedTuple):
    """A running server."""

    host: str
    port: int
    model: str
    process: subprocess.Popen


def prompts(clients: int, vocabulary: int) -> list[list[int]]:
    """Random tokens, without the first ids, which are special tokens in most vocabularies."""
    import numpy as np

    generator = np.random.default_rng(0)
    return [generator.integers(100, vocabulary, 16 + i % (LONGEST_PROMPT - 15)).tolist() for i in range(clients)]


async def ask(server: Server, prompt: list[int], tokens: int) -> tuple[list[float], float]:
    """(times at which tokens came, time of the request) of one streamed completion."""
    body = {"model": server.model, "prompt": prompt, "max_tokens": tokens, "temperature": 1.0, "seed": 1,
            "ignore_eos": True, "stream": True, "logprobs": 0}  # fmt: skip
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {server.host}\r\nContent-Type: application/json\r\n"
    started, times = time.perf_counter(), []
    reader, writer = await asyncio.open_connection(server.host, server.port, limit=2**22)
    writer.write(f"{head}Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data)
    while (line := await reader.readline()) and line.strip() != b"data: [DONE]":
        if line.startswith(b"data: "):
            choices = json.loads(line[6:])["choices"]
            count = len(choices[0]["logprobs"]["tokens"]) if choices and choices[0]["logprobs"] else 0
            times += [time.perf_counter()] * count
    writer.close()
    if len(times) != tokens:
        raise SystemExit(f"{len(times)} tokens came, {tokens} were asked for")
    return times, started


async def load(server: Server, texts: list[list[int]], tokens: int) -> Load:
    """All clients at once."""
    started = time.perf_counter()
    answers = await asyncio.gather(*(ask(server, text, tokens) for text in texts))
    seconds = time.perf_counter() - started
    first = [times[0] - asked for times, asked in answers]
    between = [b - a for times, _ in answers for a, b in itertools.pairwise(times)]
    return Load(seconds, first, between)


def environment(threads: int) -> dict[str, str]:
    """The same threads for each side."""
    more = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "2"}  # fmt: skip
    return {**os.environ, **more}


def flags(options: argparse.Namespace) -> list[str]:
    """The engine's flags, the same in its own process and in the server."""
    text = f"--max-prompt-length {LONGEST_PROMPT + 2} --max-response-length {options.tokens}"
    text += f" --rollout-max-requests {options.clients} --rollout-buffer-gb {options.buffer_gb}"
    return ["--hf-model", options.hf_model, *text.split(), *options.flags.split()]


@contextlib.contextmanager
def megarl_server(options: argparse.Namespace):
    """megarl's server on one rank, ready."""
    command = [
        sys.executable,
        "-m",
        "megarl.launcher",
        "--nproc-per-node",
        "1",
        "serve",
        *flags(options),
        "--port",
        "0",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment(options.threads))
    try:
        found = next(filter(None, map(ANNOUNCED.match, process.stdout)))
        yield wait(Server(found[2], int(found[3]), found[1], process), "/ready")
    finally:
        process.terminate()
        process.wait()


@contextlib.contextmanager
def vllm_server(options: argparse.Namespace):
    """vLLM's server, ready; None without an interpreter for it."""
    if not options.vllm_python:
        yield None
        return
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [options.vllm_python, "-m", "vllm.entrypoints.openai.api_server", "--model", options.hf_model]
    command += ["--port", str(port), "--host", "127.0.0.1", "--dtype", "float32", "--disable-log-stats"]
    command += ["--max-model-len", str(LONGEST_PROMPT + 2 + options.tokens), "--max-num-seqs", str(options.clients)]
    command += ["--disable-uvicorn-access-log"]
    process = subprocess.Popen(command, env=environment(options.threads))
    try:
        yield wait(Server("127.0.0.1", port, options.hf_model, process), "/health")
    finally:
        process.terminate()
        process.wait()


def wait(server: Server, path: str) -> Server:
    """The server, when it is ready."""
    end = time.monotonic() + SLOWEST_START
    while time.monotonic() < end and server.process.poll() is None:
        with contextlib.suppress(urllib3.exceptions.HTTPError):
            if urllib3.request("GET", f"http://{server.host}:{server.port}{path}", retries=False).status == 200:
                return server
        time.sleep(0.2)
    raise SystemExit(f"the server did not start: {server.process.args}")


@contextlib.contextmanager
def engine_process(options: argparse.Namespace):
    """A process with the engine, which generates once for each line that it gets."""
    command = [sys.executable, __file__, "--engine", *sys.argv[1:]]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, env=environment(options.threads), **pipes)
    try:
        read_seconds(process)
        yield process
    finally:
        process.stdin.close()
        process.wait()


def read_seconds(process: subprocess.Popen) -> float:
    """The next measured time of the engine's process."""
    for line in process.stdout:
        if line.startswith("seconds "):
            return float(line.split()[1])
    raise SystemExit("the engine's process has ended")


def run_engine(options: argparse.Namespace):
    """The engine's side: prints "seconds 0" when it is ready, then the time of each call."""
    from megarl.algorithms.token_sampling import SamplingSettings
    from megarl.arguments import parse
    from megarl.mcore.inference.generation import GenerationRequest
    from megarl.observe.timers import Timers
    from megarl.rollout.rollout import Rollout
    from megarl.trainers.policy import PolicyInputs
    from megarl.trainers.setup import read_inputs

    config, timers = parse(flags(options), 1, "serve"), Timers()
    inputs, mesh, _ = read_inputs(config, timers, lambda: PolicyInputs(config), sys.stderr)
    rollout = Rollout(
        config.settings, inputs.rollout_role(), mesh, inputs.load(mesh["actor"]), inputs.tokenizer, timers
    )
    texts = prompts(options.clients, inputs.tokenizer.vocab_size)
    requests = [GenerationRequest(text, key, options.tokens) for key, text in enumerate(texts)]
    rollout.engine.generate(requests[:4], (), SamplingSettings())
    print("seconds 0", flush=True)
    for _ in sys.stdin:
        started = time.perf_counter()
        rollout.engine.generate(requests, (), SamplingSettings())
        print(f"seconds {time.perf_counter() - started}", flush=True)


def measure(options: argparse.Namespace) -> dict[str, list[Load]]:
    """Rounds of each side."""
    vocabulary = json.loads((Path(options.hf_model) / "config.json").read_text())["vocab_size"]
    texts, rounds = prompts(options.clients, vocabulary), {}
    with engine_process(options) as engine, megarl_server(options) as ours, vllm_server(options) as theirs:
        servers = {name: server for name, server in (("megarl", ours), ("vLLM", theirs)) if server}
        for server in servers.values():
            asyncio.run(load(server, texts[:4], options.tokens))  # warm-up
        for _ in range(options.rounds):
            engine.stdin.write("\n")
            engine.stdin.flush()
            rounds.setdefault("engine", []).append(Load(read_seconds(engine), [], []))
            for name, server in servers.items():
                rounds.setdefault(name, []).append(asyncio.run(load(server, texts, options.tokens)))
    return rounds


def row(name: str, loads: list[Load], total: int, engine: float) -> dict:
    """Figures of a side: throughput of the median round, latencies over all rounds."""
    speed = total / statistics.median(one.seconds for one in loads)
    found = {"side": name, "tokens_per_s": round(speed, 1), "of_engine": round(speed / engine, 3)}
    for kind in ("first", "between"):
        values = sorted(value for one in loads for value in getattr(one, kind))
        if values:
            found |= {f"{kind}_p50": values[len(values) // 2], f"{kind}_p99": values[int(len(values) * 0.99)]}
    return found


def show(rows: list[dict], markdown: bool):
    """Prints the table; times in milliseconds."""
    names = ["side", "tokens_per_s", "of_engine", "first_p50", "first_p99", "between_p50", "between_p99"]
    lines = [names]
    for found in rows:
        cells = [found.get(name, "") for name in names]
        lines.append(
            [f"{1000 * c:.1f}" if n[-3:] in ("p50", "p99") and c else str(c) for n, c in zip(names, cells, strict=True)]
        )
    if markdown:
        lines.insert(1, ["---"] * len(names))
    separator = " | " if markdown else "  "
    for line in lines:
        print(separator.join(line if markdown else [cell.ljust(13) for cell in line]))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--hf-model", required=True, help="Hugging Face folder")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=48, help="tokens of each response")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2, help="of each side")
    parser.add_argument("--buffer-gb", type=float, default=1.0, help="KV cache of megarl's sides")
    parser.add_argument("--flags", default="", help="further flags of megarl's sides")
    parser.add_argument("--vllm-python", help="interpreter that has vLLM")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--engine", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        run_engine(options)
        return
    rounds, total = measure(options), options.clients * options.tokens
    engine = total / statistics.median(one.seconds for one in rounds["engine"])
    rows = [row(name, loads, total, engine) for name, loads in rounds.items()]
    show(rows, options.markdown)
    if options.json:
        options.json.write_text(json.dumps({"settings": vars(options) | {"json": None}, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
