"""The generation server: the bits of the generator in this process, whoever asks, in whatever layout."""

import base64
import functools
import io
import json
import random
import signal
import socket
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import openai
import pytest
import torch
import urllib3

from megarl.algorithms.sampling_settings import SamplingSettings
from megarl.errors import UsageError
from megarl.generation import GenerationRequest
from megarl.rollout.api import completions_of
from megarl.rollout.remote_generator import RemoteGenerator
from megarl.serving.keys import stream_key
from tests.helpers.evaluation import evaluate_argv, run_evaluate
from tests.helpers.forked_programs import error_line, launch
from tests.helpers.programs import inputs, sft_argv, train
from tests.helpers.servers import ADMIN_KEY, API_KEY, completions, scores, serve_argv, served
from tests.helpers.worlds import SAFETY_SECONDS, wait_until

LONG = (
    " --position-embedding-type rope --max-prompt-length 16 --max-response-length 112 --max-tokens-per-microbatch 256"
)
SERVED = LONG.replace(" --max-tokens-per-microbatch 256", "") + " --rollout-buffer-gb 0.004 --rollout-max-requests 64"
MOE = LONG + " --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32"
LAYOUTS = {"one rank": (1, ""), "two replicas": (2, ""), "TP 2": (2, "--tensor-model-parallel-size 2")}


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
    """Files with the keys of the tests."""
    for name, key in (("api", API_KEY), ("admin", ADMIN_KEY)):
        (inputs() / f"{name}.keys").write_text(f"\n{key}\n")
    return {name: str(inputs() / f"{name}.keys") for name in ("api", "admin")}


@functools.cache
def requests(count: int = 24) -> list[GenerationRequest]:
    """Requests with settings, lengths, end tokens and top log-probs of their own."""
    settings = [SamplingSettings(), SamplingSettings(0.7), SamplingSettings(top_k=3), SamplingSettings(greedy=True),
                SamplingSettings(1.2, 0, 0.8)]  # fmt: skip
    return [
        GenerationRequest(
            [3 + i % 9, 4, 5 + i % 7], i - 5, 5 + 3 * i, settings[i % 5], ((), (3,), (2, 7))[i % 3], i % 4
        )
        for i in range(count)
    ]


@pytest.fixture(scope="module", params=LAYOUTS)
def server(request):
    """A server in each layout, with keys, and the answers of the generator in this process."""
    size, flags = LAYOUTS[request.param]
    keys = f"--api-key-file {key_files()['api']}"
    # The log-probs of tensor-parallel ranks have roundings of their own, the tokens are those of one rank.
    expected = completions(small_argv(flags), requests(), size)
    assert [c.tokens for c in expected] == [c.tokens for c in completions(small_argv(), requests())]
    with served(small_argv(f"{flags} {keys}"), size) as running:
        yield running, expected, functools.partial(scores, small_argv(flags), size=size)


def client_of(running) -> openai.OpenAI:
    return openai.OpenAI(base_url=running.url + "/v1", api_key=API_KEY, max_retries=0, timeout=SAFETY_SECONDS)


def remote(running, **more) -> RemoteGenerator:
    return RemoteGenerator(running.url, API_KEY, seconds=SAFETY_SECONDS, **more)


# -- the same bits -----------------------------------------------------------------------------------------------


def test_every_layout_answers_as_the_generator_in_this_process(server):
    running, expected, _ = server
    generator = remote(running)
    whole = generator.generate(requests())
    assert whole == expected and len({len(completion.tokens) for completion in whole}) > 5
    for found, here in zip(whole, expected, strict=True):
        # Routes and versions aside, so are the most likely tokens; `==` leaves them out.
        assert (found.top_logprobs or None) == (here.top_logprobs or None)
    streamed = list(generator.stream(requests()))
    assert completions_of(streamed, len(requests())) == expected and len(streamed) > 2 * len(requests())
    assert generator.generate(requests()[7:8]) == expected[7:8]  # alone


def test_a_seed_gives_one_answer_alone_and_among_many_clients(server):
    running, *_, here = server
    client = client_of(running)

    def ask(seed: int, **more):
        return client.completions.create(model=running.model, prompt="7+5=", max_tokens=30, seed=seed, n=2, **more)

    alone = [[choice.text for choice in ask(seed).choices] for seed in range(3)]
    with ThreadPoolExecutor(64) as pool:
        crowd = list(pool.map(lambda i: ask(i % 3), range(64)))
    assert all([choice.text for choice in found.choices] == alone[i % 3] for i, found in enumerate(crowd))
    assert len({text for texts in alone for text in texts}) == 6
    prompt = running.post("/tokenize", {"prompt": "7+5="}, authorization=f"Bearer {API_KEY}").json()["tokens"]
    request = GenerationRequest(prompt, stream_key(1, 0, 1), 30, SamplingSettings(), tuple(ends(running)))
    (found,) = remote(running).generate([request])
    text = running.post("/detokenize", {"tokens": found.tokens}, authorization=f"Bearer {API_KEY}").json()["prompt"]
    assert text == alone[1][1]
    parts: dict[int, str] = {0: "", 1: ""}
    for chunk in ask(1, stream=True):
        parts[chunk.choices[0].index] += chunk.choices[0].text
    assert [parts[0], parts[1]] == alone[1]


def ends(running) -> list[int]:
    """The tokenizer's end tokens."""
    from megarl.data.tokenizers import build_tokenizer

    return list(build_tokenizer("SentencePieceTokenizer", str(inputs() / "tokenizer.model")).end_ids)


def test_the_tokens_of_an_answer_have_the_same_log_probs_when_they_are_sent_back(server):
    running, *_, here = server
    client, tokens = client_of(running), [5, 4, 9]
    found = remote(running).generate([GenerationRequest(tokens, 11, 40, SamplingSettings(), (), 2)])[0]
    again = client.completions.create(
        model=running.model, prompt=[*tokens, *found.tokens], echo=True, logprobs=2, max_tokens=1, temperature=1, seed=0
    )
    echoed = again.choices[0].logprobs
    assert echoed.token_logprobs[0] is None and echoed.token_logprobs[3:-1] == found.logprobs
    best = [[value for _, value in top] for top in found.top_logprobs]
    assert [sorted(top.values(), reverse=True)[:2] for top in echoed.top_logprobs[3:-1]] == best
    (local,) = here([[*tokens, *found.tokens]])
    assert local.logprobs == echoed.token_logprobs[:-1]


def test_evaluate_gives_the_same_bytes_with_a_server(tmp_path):
    flags = "--eval-responses 3 --eval-temperature 0.8 --top-k 5"
    run_evaluate(evaluate_argv(tmp_path / "own", flags))
    with served(serve_argv()) as running:
        argv = evaluate_argv(tmp_path / "remote", f"{flags} --rollout-server {running.url}")
        at = argv.index("--load")
        for size in (1, 2):
            run_evaluate(argv[:at] + argv[at + 2 :], size)
            own, other = ((tmp_path / name / "samples.jsonl").read_bytes() for name in ("own", "remote"))
            assert own == other
    results = [json.loads((tmp_path / name / "evaluation.json").read_text()) for name in ("own", "remote")]
    assert results[0]["metrics"] == results[1]["metrics"] and results[1]["rollout_server"].startswith("http://127")


def test_experts_and_their_routes():
    path = checkpoint(MOE)
    served_flags = SERVED + " --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32"
    expected = completions(serve_argv(served_flags, path), requests())
    routed = GenerationRequest([3, 4, 5], 4, 9, SamplingSettings(), ())
    (with_routes,) = completions(serve_argv(served_flags, path), [routed], routes=True)
    for size, flags in ((1, ""), (2, "--expert-model-parallel-size 2")):
        with served(serve_argv(f"{served_flags} --serve-routes {flags}", path), size) as running:
            generator = RemoteGenerator(running.url)
            assert generator.generate(requests()) == expected
            body = {"input_ids": routed.prompt, "key": routed.key, "return_routes": True}
            settings = {"max_tokens": routed.max_new_tokens, "ignore_eos": True}
            found = running.post("/generate", {**body, "sampling_params": settings}).json()["routes"]
            read = torch.frombuffer(bytearray(base64.b64decode(found["data"])), dtype=torch.int16).view(found["shape"])
            assert torch.equal(read, with_routes.routes) and found["shape"] == [12, 2, 2]
            echo = {"prompt": [3, 4, 5], "echo": True, "logprobs": 1, "max_tokens": 0, "temperature": 0}
            assert len(running.post("/v1/completions", echo).json()["choices"][0]["logprobs"]["token_logprobs"]) == 3


# -- weights and life cycle --------------------------------------------------------------------------------------


def recomputed(step: int, sequences: list[list[int]], flags: str, size: int) -> list:
    """Log-probs of sequences under the weights of a step."""
    argv = serve_argv(f"{SERVED} {flags}", checkpoint() / "checkpoints" / f"step_{step:08d}")
    return [found.logprobs for found in scores(argv, sequences, size)]


@pytest.mark.parametrize(("size", "flags"), [
    pytest.param(1, "", marks=pytest.mark.long), (2, "--tensor-model-parallel-size 2"), (2, ""),
])  # fmt: skip
def test_weights_change_under_load_and_every_token_has_its_version(size, flags):
    folder = checkpoint() / "checkpoints"
    keys = f"--admin-key-file {key_files()['admin']} --weights-folder {folder}"
    sequences, versions, logprobs = [], [], []
    with served(small_argv(f"{flags} {keys}"), size) as running:
        for mode, step in (("keep", 1), ("wait", 2), ("abort", 1), (None, 2)):
            generator = RemoteGenerator(running.url, admin_key=ADMIN_KEY, seconds=SAFETY_SECONDS)
            chunks, wanted = (
                [],
                [replace(r, sampling=SamplingSettings(), max_new_tokens=100, end_ids=()) for r in requests()],
            )
            changed = None
            for chunk in generator.stream(wanted):
                chunks.append(chunk)
                if len(chunks) == 150:
                    if mode:
                        generator.pause(mode)
                    changed = generator.update_weights(f"step_{step:08d}")
                    assert changed == generator.version
                    if mode:
                        generator.resume()
            reasons = {chunk.finish_reason for chunk in chunks} - {None}
            assert reasons == ({"length", "abort"} if mode == "abort" else {"length"}) or reasons == {"abort"}
            for number, request in enumerate(wanted):
                mine = [chunk for chunk in chunks if chunk.number == number]
                sequences.append([*request.prompt, *(token for chunk in mine for token in chunk.tokens)])
                versions.append([chunk.version for chunk in mine for _ in chunk.tokens])
                logprobs.append([value for chunk in mine for value in chunk.logprobs])
        assert running.get("/ready").json()["label"] == "step_00000002"
    by_step = {step: recomputed(step, sequences, flags, size) for step in (1, 2)}
    for number, (of_token, found) in enumerate(zip(versions, logprobs, strict=True)):
        # Version 0 is the latest checkpoint, step 2; then step 1, 2, 1 and 2.
        expected = [by_step[1 if version in (1, 3) else 2][number][3 + i] for i, version in enumerate(of_token)]
        assert found == expected
    assert {version for of_token in versions for version in of_token} == {0, 1, 2, 3, 4}
    assert any(len(set(of_token)) > 1 for of_token in versions)


def test_wrong_weights_leave_the_old_ones(tmp_path):
    folder = inputs()
    keys = f"--admin-key-file {key_files()['admin']} --weights-folder {folder}"
    with served(small_argv(keys)) as running:
        generator = RemoteGenerator(running.url, admin_key=ADMIN_KEY)
        before = generator.generate(requests())
        for path in (checkpoint(MOE).name, "nothing", "../x", "/etc", "train.jsonl"):
            with pytest.raises(UsageError, match="status 400"):
                generator.update_weights(path)
        assert generator.version == 0 and generator.generate(requests()) == before
        refused = running.post("/generate", {"input_ids": [3], "return_routes": True})
        assert refused.status == 400 and "--serve-routes" in refused.json()["error"]["message"]
        with pytest.raises(UsageError, match="status 401"):
            RemoteGenerator(running.url, admin_key="another key").pause()


def test_sigterm_lets_running_requests_end():
    with served(small_argv()) as running:
        stream = iter(RemoteGenerator(running.url).stream([replace(requests()[0], max_new_tokens=112)]))
        chunks = [next(stream)]
        running.process.send_signal(signal.SIGTERM)
        chunks += stream
        assert chunks[-1].finish_reason == "length" and sum(len(chunk.tokens) for chunk in chunks) == 112
        assert running.process.wait(SAFETY_SECONDS) == 0


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_rank_ends_the_server_with_a_clear_answer(killed):
    with served(small_argv("--tensor-model-parallel-size 2"), 2) as running:
        generator = RemoteGenerator(running.url, seconds=5)
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


def test_cut_connections_free_the_cache():
    cut_connections(100)


@pytest.mark.long
def test_a_thousand_cut_connections_free_the_cache():
    cut_connections(1000)


def cut_connections(count: int):
    with served(small_argv()) as running:
        host, port = running.url.removeprefix("http://").split(":")
        before = running.free_blocks()
        assert before > 0
        for number in range(count):
            body = {
                "prompt": [3, 4, 5],
                "max_tokens": 112,
                "stream": bool(number % 2),
                "ignore_eos": True,
                "n": 1 + number % 3,
            }
            data = json.dumps(body).encode()
            head = ["POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json"]
            head = "\r\n".join([*head, f"Content-Length: {len(data)}", "", ""])
            with socket.create_connection((host, int(port))) as connection:
                connection.sendall(head.encode() + data[: len(data) - number % 5 // 4])
                if number % 3 == 0 and number % 5 != 4 and number % 2:
                    connection.recv(64)
        assert wait_until(lambda: running.free_blocks() == before)
        assert completions(small_argv(), requests()) == RemoteGenerator(running.url).generate(requests())


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
            head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            slow.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
            generator = RemoteGenerator(running.url, admin_key=ADMIN_KEY, seconds=SAFETY_SECONDS)
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


# -- wrong input -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("flags", "says"), [
    ("--host 0.0.0.0", "--host 0.0.0.0: others can reach it; needs --api-key-file"),
    ("--host example.invalid", "--host example.invalid: others can reach it"),
    ("--api-key-file nowhere", "--api-key-file nowhere: cannot be read"),
    ("--api-key-file SHORT", "a key has fewer than 16 characters"),
    ("--api-key-file EMPTY", "has no key"),
    ("--weights-folder nowhere", "--weights-folder nowhere: no such folder"),
    ("--weights-folder .", "--weights-folder .: needs --admin-key-file"),
    ("--serve-routes", "--serve-routes: needs a model with experts"),
    ("--port 70000", "--port 70000: allowed is 0 to 65535"),
    ("--served-model-name a&b", "--served-model-name a&b: allowed is letters"),
    ("--max-choices 0", "--max-choices 0"),
])  # fmt: skip
def test_wrong_flags_end_with_one_line(tmp_path, flags, says):
    (tmp_path / "short").write_text("secret\n")
    (tmp_path / "empty").write_text("\n\n")
    flags = flags.replace("SHORT", str(tmp_path / "short")).replace("EMPTY", str(tmp_path / "empty"))
    assert says in error_line(launch(tmp_path, serve_argv(flags), "serve"))


def test_a_port_in_use_ends_with_one_line(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        status, _, err = launch(tmp_path, serve_argv(f"--port {taken.getsockname()[1]}"), "serve")
    assert status == 2 and "cannot listen there" in err.splitlines()[-1]


def test_a_client_says_what_is_wrong_with_its_server(tmp_path):
    with pytest.raises(UsageError, match="--rollout-server ftp://x: not an address"):
        RemoteGenerator("ftp://x")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(RuntimeError, match="no answer"):
        RemoteGenerator(f"http://127.0.0.1:{port}", seconds=5).generate(requests()[:1])
    argv = evaluate_argv(None, "--rollout-server http://x")
    assert "has the weights; leave it out" in error_line(launch(tmp_path, argv, "evaluate"))
