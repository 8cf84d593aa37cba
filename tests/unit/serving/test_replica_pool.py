"""Queueing, routing, aborting, losing leaders and draining, in the real process with scripted leaders."""

import concurrent.futures
import contextlib
import os
import signal
import socket

import httpx
import openai
import pytest

from megarl.serving.replica_messages import Abort, Control, Drain, Generate, Report, RequestUpdate
from tests.helpers.server.serving import served, silent
from tests.helpers.tiers import by_default
from tests.helpers.waiting import SAFETY_SECONDS


@contextlib.contextmanager
def posting(server, *bodies, path="/v1/completions"):
    """Sends each body from a thread of its own, and gives the futures of the answers."""
    with concurrent.futures.ThreadPoolExecutor(len(bodies)) as pool:
        yield [pool.submit(httpx.post, f"{server.url}{path}", json=body, timeout=SAFETY_SECONDS) for body in bodies]


def ids(leader, count):
    return [frame.id for frame in leader.wait_for(count)]


def wait_for_queue(server, count: int):
    while f"megarl_waiting_requests {count}.0" not in server.client.get("/metrics").text:
        pass  # until so many are in the queue


@pytest.fixture(scope="module")
def silent_server(tmp_path_factory):
    with served(tmp_path_factory.mktemp("silent"), silent) as made:
        yield made
    assert made.stderr == ""


@pytest.fixture
def server(silent_server):
    """A server whose leader answers nothing by itself, and has got nothing."""
    silent_server.leaders[0].frames.clear()
    return silent_server


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_aborts_its_request(server, stream):
    leader = server.leaders[0]
    body = b'{"prompt": "a", "n": 2, "stream": %s}' % (b"true" if stream else b"false")
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(head.encode() + body)
        first, second = ids(leader, 2)
        if stream:
            leader.tokens([first, server.tokenizer.encode("a"), [-1.0], None, None])
            assert client.recv(10)
    aborted = leader.wait_for(1, Abort)[0].ids
    assert sorted(aborted) == [first, second]
    leader.tokens([first, [5], [-1.0], None, None])  # on its way already: nobody is there to get it
    with posting(server, {"prompt": "b"}) as answers:
        third = ids(leader, 3)[-1]
        leader.tokens([third, [], [], None, "length"])
        assert answers[0].result().json()["choices"][0]["text"] == ""


def test_a_stop_string_aborts_and_frees_the_slot(tmp_path):
    with served(tmp_path, silent, ready={"max_requests": 1}) as server:
        leader = server.leaders[0]
        with posting(server, {"prompt": "a", "stop": "x"}, {"prompt": "a", "stop": "x"}) as answers:
            for number in (1, 2):
                request = ids(leader, number)[-1]
                leader.tokens([request, server.tokenizer.encode("axb"), [-1.0] * 3, None, None])
                assert request in leader.wait_for(number, Abort)[-1].ids
            for answer in answers:
                assert answer.result().json()["choices"][0]["text"] == "a"
                assert answer.result().json()["usage"]["completion_tokens"] == 2


def test_the_queue_is_bounded(tmp_path):
    with served(tmp_path, silent, ready={"max_requests": 1}, max_queue=1) as server:
        leader = server.leaders[0]
        with posting(server, {"prompt": "a", "n": 2}) as answers:
            first = ids(leader, 1)[0]
            full = server.post("/v1/completions", prompt="b")
            assert full.status_code == 429 and full.headers["retry-after"] == "1"
            assert full.json()["error"]["code"] == "queue_full"
            with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
                with pytest.raises(openai.RateLimitError):
                    client.completions.create(model="tiny", prompt="b")
            leader.link.send(Report(0, "step_7", 50, is_open=False, updates=[RequestUpdate(first)]))
            while server.post("/v1/completions", prompt="b").status_code == 429:
                pass  # until the frontend has read the message
            closed = server.post("/v1/completions", prompt="b")
            assert closed.status_code == 503 and closed.headers["retry-after"] == "1"
            never = server.post("/v1/completions", prompt="b", n=3)
            assert never.status_code == 400 and len(leader.wait_for(1)) == 1
            leader.tokens([first, [], [], None, "length"])
            leader.tokens([ids(leader, 2)[1], [], [], None, "length"])
            assert answers[0].result().status_code == 200


@pytest.mark.parametrize("by_key", [True, False])
def test_clients_take_turns_in_the_queue(tmp_path, by_key):
    keys = ["sk-1", "sk-2"] if by_key else []

    def client(number: int) -> httpx.Client:
        address = "127.0.0.1" if by_key else f"127.0.0.{number + 1}"
        headers = {"Authorization": f"Bearer {keys[number]}"} if by_key else {}
        transport = httpx.HTTPTransport(local_address=address)
        return httpx.Client(base_url=server.url, headers=headers, transport=transport, timeout=SAFETY_SECONDS)

    with served(tmp_path, silent, ready={"max_requests": 1}, api_keys=keys) as server:
        leader = server.leaders[0]
        with client(0) as many, client(1) as few, concurrent.futures.ThreadPoolExecutor(2) as pool:
            first = pool.submit(many.post, "/v1/completions", json={"prompt": [1], "n": 6})
            wait_for_queue(server, 5)
            second = pool.submit(few.post, "/v1/completions", json={"prompt": [2], "n": 2, "stream": True})
            wait_for_queue(server, 7)
            for count in range(1, 9):
                leader.tokens([ids(leader, count)[-1], [], [], None, "length"])
            assert first.result().status_code == second.result().status_code == 200
        assert [frame.prompt[0] for frame in leader.wait_for(8)] == [1, 1, 2, 1, 2, 1, 1, 1]


def test_sessions_and_prompts_choose_the_replica(tmp_path):
    def answer(leader, frame):
        if isinstance(frame, Generate):
            leader.tokens([frame.id, [], [], None, "length"])

    with served(tmp_path, answer, leaders=2) as server:
        long, other = list(range(40)), list(range(40, 90))
        one, two = server.leaders
        with posting(server, {"prompt": other, "stream": False}):
            pass
        first = one if one.frames else two
        for body in (
            dict(prompt=other), dict(prompt=other, user="me"), dict(prompt=long, user="me"),
            dict(prompt=[1], prompt_cache_key="me"), dict(prompt=long),
        ):  # fmt: skip
            assert server.post("/v1/completions", **body).status_code == 200
        assert len(first.wait_for(6)) == 6 and not (two if first is one else one).frames


def test_requests_are_spread_over_the_replicas(tmp_path):
    with served(tmp_path, silent, leaders=2, ready={"max_requests": 2}) as server:
        with posting(server, *({"prompt": [number + 10]} for number in range(4))) as answers:
            for leader in server.leaders:
                leader.wait_for(2)
            for leader in server.leaders:
                leader.tokens(*([number, [], [], None, "length"] for number in ids(leader, 2)))
            assert [answer.result().status_code for answer in answers] == [200] * 4


def test_refused_requests_are_errors_of_the_client(tmp_path):
    def refuse(leader, frame):
        leader.tokens(RequestUpdate(frame.id, error="too long"))

    with served(tmp_path, refuse) as server:
        for stream in (False, True):
            answer = server.post("/v1/completions", prompt="a", stream=stream)
            assert answer.status_code == 400 and answer.json()["error"]["message"] == "too long"


def test_a_request_that_takes_too_long_ends(tmp_path):
    with served(tmp_path, silent, request_timeout=0.2) as server:
        answer = server.post("/v1/completions", prompt="a", stream=True)
        assert answer.status_code == 503 and answer.json()["error"]["type"] == "timeout"
        assert server.leaders[0].wait_for(1, Abort)


@pytest.mark.parametrize("loss", by_default(["leader", "rank 0", "message"], ["rank 0"]))
def test_the_loss_of_the_ranks_fails_all_requests_and_ends_the_process(tmp_path, loss):
    with served(tmp_path, silent, leaders=2, ready={"max_requests": 1}) as server:
        leader = server.leaders[0]
        with posting(server, *({"prompt": "a"} for _ in range(3))) as answers:
            for each in server.leaders:
                each.wait_for(1)
            wait_for_queue(server, 1)
            if loss == "leader":
                leader.close()
            elif loss == "rank 0":
                server.process.connection.close()
            else:
                leader.tokens([])
            assert [answer.result().status_code for answer in answers] == [503] * 3
        assert server.exit_status() == 1


def test_a_started_stream_ends_with_an_error_event(tmp_path):
    with served(tmp_path, silent) as server:
        leader = server.leaders[0]
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            events = pool.submit(server.events, "/v1/completions", prompt="a")
            leader.tokens([ids(leader, 1)[0], server.tokenizer.encode("b"), [-1.0], None, None])
            leader.tokens([1, [], [], None, None])
            leader.close()
            assert "replica is lost" in events.result()[-1]["error"]["message"]


def test_signals_are_ignored_and_drain_finishes_what_runs(tmp_path):
    with served(tmp_path, silent, leaders=2, ready={"max_requests": 1}) as server:
        one, two = server.leaders
        with posting(server, *({"prompt": "a"} for _ in range(3))) as answers:
            ids(one, 1), ids(two, 1)
            wait_for_queue(server, 1)
            for number in (signal.SIGTERM, signal.SIGINT):
                os.kill(server.process.process.pid, number)
            one.link.send(Drain())
            while server.client.get("/ready").status_code == 200:
                pass  # until the frontend has read the message
            refused = server.post("/v1/completions", prompt="b")
            assert refused.status_code == 503 and refused.headers["retry-after"]
            assert server.client.get("/health").status_code == 200
            server.client.close()
            one.tokens([ids(one, 1)[0], [], [], None, "stop"])
            one.tokens([ids(one, 2)[1], [], [], None, "stop"])
            two.tokens([ids(two, 1)[0], [], [], None, "abort"])
            assert [answer.result().status_code for answer in answers] == [200] * 3
            reasons = sorted(answer.result().json()["choices"][0]["finish_reason"] for answer in answers)
            assert reasons == ["abort", "stop", "stop"]
        assert one.wait_for(1, Control) == two.wait_for(1, Control) == [Control("stop")]
        assert server.exit_status() == 0
    assert server.stderr == ""


def test_not_ready_before_all_leaders_are(tmp_path):
    with served(tmp_path, leaders=0, replicas=2) as server:
        one = server.connect(0)
        assert server.client.get("/ready").status_code == 503 and server.client.get("/health").status_code == 200
        assert server.post("/v1/completions", prompt="a").status_code == 503
        server.connect(1)
        server.wait_ready()
        again = server.connect(1)
        again.wait_closed()
        assert one.frames == []


def test_each_token_has_its_own_version(server):
    leader = server.leaders[0]
    with posting(server, {"input_ids": [5]}, path="/generate") as answers:
        number = ids(leader, 1)[0]
        leader.tokens([number, [7, 8], [-1.0, -2.0], None, None], version=3)
        leader.tokens([number, [9], [float("-inf")], None, "length"], version=4)
        result = answers[0].result().json()
    assert result["versions"] == [3, 3, 4] and result["system_fingerprint"] == "step_7-v4"
    assert result["logprobs"] == [-1.0, -2.0, -9999.0]
