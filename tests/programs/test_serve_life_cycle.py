"""The generation server over time: weights that change, signals, lost ranks, clients that come, go and crowd."""

import functools
import io
import json
import random
import shutil
import signal
import socket
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import urllib3

from megarl.algorithms.token_sampling import SamplingSettings
from megarl.checkpoint import manifest
from megarl.errors import UsageError
from tests.helpers.programs import inputs
from tests.helpers.server.server_clients import ServerClient, completions_of
from tests.helpers.server.servers import (
    ADMIN_KEY,
    MOE,
    SERVED,
    checkpoint,
    completions,
    key_files,
    requests,
    scores,
    serve_argv,
    served,
    small_argv,
)
from tests.helpers.tiers import long
from tests.helpers.worlds import SAFETY_SECONDS, wait_until


def recomputed(step: int, sequences: list[list[int]], flags: str, size: int) -> list:
    """Log-probs of sequences under the weights of a step."""
    argv = serve_argv(f"{SERVED} {flags}", checkpoint() / "checkpoints" / f"step_{step:08d}")
    return [found.logprobs for found in scores(argv, sequences, size)]


@pytest.mark.parametrize(("size", "flags"), [
    (1, ""), long((2, "--tensor-model-parallel-size 2")), long((2, "")),
])  # fmt: skip
def test_weights_change_under_load_and_every_token_has_its_version(size, flags):
    folder = checkpoint() / "checkpoints"
    keys = f"--admin-key-file {key_files()['admin']} --weights-folder {folder}"
    steps = [2]  # of each version: version 0 is the latest checkpoint
    outcomes = []
    with served(small_argv(f"{flags} {keys}"), size) as running:
        generator = ServerClient(running.url, admin_key=ADMIN_KEY, seconds=SAFETY_SECONDS)
        for mode in ("keep", "wait", "abort", None):
            for _ in range(20):  # on a busy machine the requests may have ended before the client reads its first chunk
                steps.append(3 - steps[-1])
                new, has_met = change_weights_under_load(generator, mode, steps[-1])
                outcomes += new
                if has_met or mode == "wait":  # which lets running requests end first
                    break
            else:
                pytest.fail(f"no request was running when its weights changed (mode {mode})")
        assert running.get("/ready").json()["label"] == f"step_{steps[-1]:08d}"
    sequences = [[*request.prompt, *done.tokens] for request, done in outcomes]
    by_step = {step: recomputed(step, sequences, flags, size) for step in (1, 2)}
    for number, (request, done) in enumerate(outcomes):
        start = len(request.prompt)
        expected = [by_step[steps[version]][number][start + i] for i, version in enumerate(done.versions)]
        assert done.logprobs == expected
    assert {version for _, done in outcomes for version in done.versions} == set(range(len(steps)))


def change_weights_under_load(generator: ServerClient, mode: str | None, step: int) -> tuple[list[tuple], bool]:
    """(request, completion) of all requests of a stream in whose course the server takes the weights of a step, and
    whether a running request has met the change: an abort, or tokens of both weights."""
    wanted = [replace(r, sampling=SamplingSettings(), max_new_tokens=100, end_ids=()) for r in requests()]
    chunks = []
    for chunk in generator.stream(wanted):
        chunks.append(chunk)
        if len(chunks) == 10:
            if mode:
                generator.pause(mode)
            assert generator.update_weights(f"step_{step:08d}") == generator.version
            if mode:
                generator.resume()
    reasons = {chunk.finish_reason for chunk in chunks} - {None}
    assert reasons <= ({"length", "abort"} if mode == "abort" else {"length"})
    done = completions_of(chunks, len(wanted))
    has_met = "abort" in reasons if mode == "abort" else any(len(set(one.versions)) > 1 for one in done)
    return list(zip(wanted, done, strict=True)), has_met


def hostile_checkpoint(folder: Path) -> Path:
    """A run whose manifest has the right checksum and numbers instead of files."""
    run = shutil.copytree(checkpoint(MOE), folder / "hostile")
    for step in (run / "checkpoints").glob("step_*"):
        manifest.write(step, manifest.read(step, "--load") | {"files": {"a.pt": 3}})
    return run


def test_wrong_weights_leave_the_old_ones(tmp_path):
    folder = inputs()
    hostile = hostile_checkpoint(folder)
    keys = f"--admin-key-file {key_files()['admin']} --weights-folder {folder}"
    with served(small_argv(keys)) as running:
        generator = ServerClient(running.url, admin_key=ADMIN_KEY)
        before = generator.generate(requests())
        for path in (checkpoint(MOE).name, hostile.name, "nothing", "../x", "/etc", "train.jsonl"):
            with pytest.raises(UsageError, match="status 400"):
                generator.update_weights(path)
        assert generator.version == 0 and generator.generate(requests()) == before
        refused = running.post("/generate", {"input_ids": [3], "return_routes": True})
        assert refused.status == 400 and "--serve-routes" in refused.json()["error"]["message"]
        with pytest.raises(UsageError, match="status 401"):
            ServerClient(running.url, admin_key="another key").pause()


def test_sigterm_lets_running_requests_end():
    with served(small_argv()) as running:
        stream = iter(ServerClient(running.url).stream([replace(requests()[0], max_new_tokens=112)]))
        chunks = [next(stream)]
        running.process.send_signal(signal.SIGTERM)
        chunks += stream
        assert chunks[-1].finish_reason == "length" and sum(len(chunk.tokens) for chunk in chunks) == 112
        assert running.process.wait(SAFETY_SECONDS) == 0


@pytest.mark.parametrize("killed", [long(0), 1])
def test_a_killed_rank_ends_the_server_with_a_clear_answer(killed):
    with served(small_argv("--tensor-model-parallel-size 2"), 2) as running:
        generator = ServerClient(running.url, seconds=5)
        stream = iter(generator.stream([replace(requests()[0], max_new_tokens=112)] * 4))
        next(stream)
        ranks = children_of(running.process.pid)
        assert len(ranks) >= 2
        ranks[killed].kill()
        with pytest.raises(RuntimeError, match="a replica is lost|program that generates"):
            completions_of(stream, 4)
        assert running.process.wait(SAFETY_SECONDS) != 0


def children_of(pid: int) -> list:
    """The ranks of a launcher, by rank."""
    import psutil

    children = psutil.Process(pid).children()
    return sorted((child for child in children if child.name().startswith("python")), key=lambda child: child.pid)


@pytest.mark.parametrize("count", [30, long(1000)])
def test_cut_connections_free_the_cache(count):
    with served(small_argv()) as running:
        host, port = running.url.removeprefix("http://").split(":")
        before = running.free_blocks()
        assert before > 0
        for number in range(count):
            body = dict(prompt=[3, 4, 5], max_tokens=112, stream=bool(number % 2), ignore_eos=True, n=1 + number % 3)
            data = json.dumps(body).encode()
            head = ["POST /v1/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
            head = "\r\n".join([*head, f"Content-Length: {len(data)}", "", ""])
            with socket.create_connection((host, int(port))) as connection:
                connection.sendall(head.encode() + data[: len(data) - number % 5 // 4])
                if number % 3 == 0 and number % 5 != 4 and number % 2:
                    connection.recv(64)
        assert wait_until(lambda: running.free_blocks() == before)
        assert completions(small_argv(), requests()) == ServerClient(running.url).generate(requests())


@pytest.mark.long
def test_random_streams_are_their_whole_answers():
    fuzz_streams(60)


@pytest.mark.long
def test_thousands_of_random_streams_are_their_whole_answers():
    fuzz_streams(3000)


def random_body(draw: random.Random) -> dict:
    """A valid request with random fields and a seed."""
    body = {"seed": draw.randrange(1 << 40), "max_tokens": draw.randrange(1, 60), "n": draw.randrange(1, 5)}
    body["prompt"] = draw.choice(["7+5=", ["3+4=", "1"], [3, 4, 5], [[3, 9], [12, 4, 4, 4]]])
    fields = {
        "stop": ["1", ["2+", "33"], ["=1", "9", "5"]], "logprobs": [0, 1, 3], "echo": [True],
        "temperature": [0, 0.3, 1.4], "top_k": [1, 3, -1], "top_p": [0.5, 0.9],
        "stop_token_ids": [[5], [3, 8]], "ignore_eos": [True], "include_stop_str_in_output": [True],
    }  # fmt: skip
    return body | {name: draw.choice(values) for name, values in fields.items() if draw.random() < 0.4}


def fuzz_streams(count: int):
    """Random requests, whole and as streams; every third stream is cut in the middle."""
    draw = random.Random(1)
    with served(small_argv()) as running, ThreadPoolExecutor(8) as pool:
        free = running.free_blocks()
        bodies = [random_body(draw) for _ in range(count)]
        whole = [answer.json()["choices"] for answer in pool.map(lambda b: running.post("/v1/completions", b), bodies)]
        cuts = [draw.randrange(1, 40) if number % 3 == 0 else None for number in range(count)]
        for body, expected, found in zip(bodies, whole, pool.map(functools.partial(streamed, running), bodies, cuts)):
            for choice in expected if found is not None else ():
                text, logprobs, finish = found[choice["index"]]
                assert (text, finish) == (choice["text"], choice["finish_reason"]), body
                assert logprobs == choice["logprobs"], body
        assert wait_until(lambda: running.free_blocks() == free)


def streamed(running, body: dict, cut: int | None) -> dict | None:
    """(text, log-probs, finish reason) of each choice of a stream; None for one that is cut after some lines."""
    found = defaultdict(lambda: ["", None, None])
    answer = urllib3.request(
        "POST", running.url + "/v1/completions", json={**body, "stream": True}, preload_content=False
    )
    for number, line in enumerate(io.TextIOWrapper(answer, encoding="utf-8")):
        if number == cut:
            answer.close()
            return None
        if not line.startswith("data: {"):
            continue
        for part in json.loads(line[6:])["choices"]:
            choice = found[part["index"]]
            choice[0] += part["text"]
            choice[2] = part["finish_reason"] or choice[2]
            if part["logprobs"] is not None:
                choice[1] = choice[1] or {name: [] for name in part["logprobs"]}
                for name, values in part["logprobs"].items():
                    choice[1][name] += values
    return found


@pytest.mark.long
def test_a_thousand_queued_requests_a_full_queue_and_a_slow_reader():
    keys = f"--admin-key-file {key_files()['admin']} --max-queue 1000"
    expected = completions(small_argv(), requests())
    with served(small_argv(keys)) as running, ThreadPoolExecutor(1) as pool:
        host, port = running.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as slow:  # it never reads its stream
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            body = json.dumps(
                {"prompt": [3, 4], "max_tokens": 112, "n": 60, "ignore_eos": True, "stream": True, "logprobs": 3}
            )
            head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            slow.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
            generator = ServerClient(running.url, admin_key=ADMIN_KEY, seconds=SAFETY_SECONDS)
            assert generator.generate(requests()) == expected
        generator.pause("wait")
        queued = {"input_ids": [[3, 4, 5 + i % 7] for i in range(1000)], "key": list(range(1000)),
                  "sampling_params": {"max_tokens": 2, "ignore_eos": True}}  # fmt: skip
        answer = pool.submit(running.post, "/generate", queued)
        assert wait_until(lambda: "megarl_waiting_requests 936.0" in running.get("/metrics").data.decode())
        refused = running.post("/generate", {"input_ids": [[3]] * 100, "sampling_params": {"max_tokens": 2}})
        assert refused.status == 503 and int(refused.headers["Retry-After"]) > 0
        huge = running.post("/v1/completions", {"prompt": "7" * (17 << 20)})
        assert huge.status == 413 and huge.json()["error"]["type"] == "request_too_large"
        generator.resume()
        found = [result["output_ids"] for result in answer.result().json()]
        again = {**queued, "input_ids": queued["input_ids"][::-1], "key": queued["key"][::-1]}
        assert found == [result["output_ids"] for result in running.post("/generate", again).json()][::-1]
