"""Where an HTTP process listens; connections that say nothing, are too many, or come from a page of another origin."""

import asyncio
import contextlib
import resource
import select
import socket
import time

import pytest

from megarl.errors import UsageError
from megarl.flags.serving import Serving
from megarl.serving.listening import RESERVED, listen_to_clients, max_connections, while_open
from megarl.serving.replica_messages import Drain
from tests.helpers.server import rude_clients
from tests.helpers.server.serving import served
from tests.helpers.tiers import long
from tests.helpers.waiting import SAFETY_SECONDS, wait_until


def connect(server) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", server.port))
    client.settimeout(SAFETY_SECONDS)
    return client


def head(path: str = "/health", **headers: str) -> bytes:
    fields = "".join(f"{k.replace('_', '-')}: {v}\r\n" for k, v in ({"Host": "localhost"} | headers).items())
    return f"GET {path} HTTP/1.1\r\n{fields}\r\n".encode()


@pytest.fixture(scope="module")
def hasty(tmp_path_factory):
    """A server whose clients have little time."""
    with served(tmp_path_factory.mktemp("hasty"), connection_timeout=0.3, max_body_mb=1) as made:
        yield made
        assert made.stderr == ""


def status(client: socket.socket, request: bytes) -> int:
    client.sendall(request)
    return int(client.recv(1000).split()[1])


@pytest.mark.parametrize(
    "sent", [long(b""), b"GET /health HTTP/1.1\r\nHost: localh", long(b"POST /generate HTTP/1.1\r\n")]
)
def test_a_client_that_sends_no_head_is_closed(sent, hasty):
    with connect(hasty) as client:
        client.sendall(sent)
        assert client.recv(1000) == b""
        assert hasty.client.get("/health").status_code == 200


def test_a_client_that_sends_half_a_body_gets_an_answer(hasty):
    with connect(hasty) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n"
                       b"Content-Type: application/json\r\n\r\n{")  # fmt: skip
        assert client.recv(1000).split()[1] == b"503"


def test_the_head_of_a_second_request_must_come_in_time(hasty):
    with connect(hasty) as client:
        assert status(client, head()) == 200
        client.sendall(b"GET /hea")
        rest = b""
        with contextlib.suppress(ConnectionResetError):
            while part := client.recv(1000):
                rest += part
        assert b"HTTP/1.1 200" not in rest


def test_health_has_a_place_beside_too_many_clients(tmp_path):
    with served(tmp_path, max_connections=3, admin_keys=["k" * 16], api_keys=["a" * 16]) as server:
        server.client.close()
        with contextlib.ExitStack() as stack:
            idle = [stack.enter_context(connect(server)) for _ in range(3)]
            assert all(status(each, head()) == 200 for each in idle)  # the server has seen them
            one, other = (stack.enter_context(connect(server)) for _ in range(2))
            assert status(one, head()) == 200
            assert status(other, head("/v1/models", Authorization=f"Bearer {'a' * 16}")) == 503
            crowd = [stack.enter_context(connect(server)) for _ in range(RESERVED + 5)]
            closed = 0
            for each in crowd:
                with contextlib.suppress(ConnectionResetError, BrokenPipeError):
                    each.sendall(head())
                    closed -= bool(each.recv(1000))
                closed += 1
            assert closed >= 5

        def is_free() -> bool:
            with connect(server) as client:
                return status(client, head("/v1/models", Authorization=f"Bearer {'a' * 16}")) == 200

        assert wait_until(is_free)  # once the server has seen that they have gone


def test_a_crowd_that_says_nothing_leaves_no_lines(tmp_path):
    with served(tmp_path, max_connections=20) as server:
        with contextlib.ExitStack() as stack:
            for _ in range(200):
                stack.enter_context(connect(server)).sendall(b"\x00garbage\r\n\r\n")
        assert server.client.get("/health").status_code == 200
    assert server.stderr == ""


def test_clients_that_break_off_leave_no_lines(tmp_path):
    long_answer = {"max_tokens": 400, "stream": True, "ignore_eos": True}
    with served(tmp_path) as server:
        rude_clients.visit_all(server.port, "/v1/completions", {"prompt": "a", "logprobs": 3, **long_answer})
        rude_clients.visit_all(server.port, "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]})
        rude_clients.visit_all(server.port, "/v1/nothing", {})
        assert server.post("/v1/completions", prompt="a").status_code == 200  # after all that the leader has answered
        assert len(server.leaders[0].wait_for(10)) >= 10
        server.leaders[0].link.send(Drain())
        assert server.exit_status() == 0
        assert server.stderr == ""


class _Connection(asyncio.Transport):
    closed = False

    def is_closing(self):
        return self.closed

    def abort(self):
        self.closed = True


@pytest.mark.parametrize("ends", ["gives up", "is cancelled", "is whole"])
def test_an_answer_that_breaks_off_ends_its_connection_in_silence(ends):
    connection, sent = _Connection(), []

    async def app(scope, receive, send):
        await send({"type": "http.response.start"})
        await send({"type": "http.response.body", "more_body": ends != "is whole"})
        if ends == "is cancelled":
            raise asyncio.CancelledError

    async def send(message):
        sent.append(message["type"])

    asyncio.run(while_open(app, connection)({"type": "http"}, None, send))
    assert sent == ["http.response.start", "http.response.body"] and connection.closed == (ends != "is whole")
    asyncio.run(while_open(app, connection)({"type": "http"}, None, send))
    assert len(sent) == (4 if ends == "is whole" else 2), "nothing is sent to a client that has gone"


@pytest.mark.parametrize("headers, expected", [
    ({}, 200), ({"Host": "127.0.0.1:80"}, 200), ({"Host": "[::1]:80"}, 200), ({"Host": "LOCALHOST"}, 200),
    ({"Host": "evil.example"}, 403), ({"Host": "localhost.evil.example"}, 403), ({"Host": ""}, 403),
    ({"Origin": "http://evil.example"}, 403), ({"Origin": "null"}, 403), ({"Origin": "http://localhost"}, 200),
    ({"Host": "localhost:9", "Origin": "http://localhost:10"}, 403),
])  # fmt: skip
def test_pages_of_other_origins_may_not_use_a_server_without_keys(headers, expected, server):
    with connect(server) as client:
        assert status(client, head("/v1/models", **headers)) == expected


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with served(tmp_path_factory.mktemp("server")) as made:
        yield made


def test_with_keys_any_host_may_be_named(guarded):
    with connect(guarded) as client:
        assert status(client, head("/v1/models", Host="a.example", Authorization=f"Bearer {'a' * 16}")) == 200


def test_a_body_of_two_lengths_is_refused(server):
    with connect(server) as client:
        body = b"2\r\n{}\r\n0\r\n\r\n"
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n"
                       b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n" + body)  # fmt: skip
        answer = b"".join(iter(lambda: client.recv(1000), b""))
        assert answer.split()[1] == b"400" and b"Content-Length and Transfer-Encoding" in answer


@pytest.mark.parametrize("key, expected", [("a" * 16, b"413"), ("b" * 16, b"401")])
def test_an_answer_before_the_end_of_the_body_reaches_a_client_that_sends_it_first(key, expected, guarded):
    with connect(guarded) as client:
        sent = head("/v1/completions", Content_Length=str(2 << 20), Connection="close", Authorization=f"Bearer {key}")
        client.sendall(sent.replace(b"GET", b"POST"))
        assert select.select([client], [], [], SAFETY_SECONDS)[0]  # it is answered
        for _ in range(64):
            client.sendall(bytes(1 << 15))
            time.sleep(0.001)  # a reset of the connection would arrive
        answer = b"".join(iter(lambda: client.recv(1000), b""))
        assert answer.split()[1] == expected and answer.endswith(b"}")


def test_a_body_that_never_ends_keeps_no_connection(hasty):
    with connect(hasty) as client:
        sent = head("/v1/completions", Content_Length=str(2 << 20), Connection="close")
        client.sendall(sent.replace(b"GET", b"POST") + b"{")
        answer = b"".join(iter(lambda: client.recv(1000), b""))
        assert answer.split()[1] == b"413"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    with served(tmp_path_factory.mktemp("guarded"), api_keys=["a" * 16], max_body_mb=1) as made:
        yield made


def test_as_many_connections_as_files_allow(monkeypatch):
    limits = {"now": (256, 300)}
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits["now"])
    monkeypatch.setattr(resource, "setrlimit", lambda _, found: limits.update(now=found))
    assert max_connections(1024) == 300 - RESERVED - 128 and limits["now"] == (300, 300)
    limits["now"] = (256, resource.RLIM_INFINITY)
    assert max_connections(1024) == 1024 and limits["now"][0] == 1024 + RESERVED + 128
    limits["now"] = (10, 10)
    assert max_connections(1024) == 1


def test_connections_send_the_parts_of_an_answer_at_once():
    http, url = listen_to_clients(Serving(port=0))
    with http, socket.create_connection(url.removeprefix("http://").split(":")):
        connection, _ = http.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        with pytest.raises(UsageError, match="cannot listen there"):
            listen_to_clients(Serving(port=http.getsockname()[1]))
