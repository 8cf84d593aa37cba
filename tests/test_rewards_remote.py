"""The remote verifier against a real server: answers, retries, limits of time, and a reason for each failure."""

import http.server
import json
import threading
import time
from collections import Counter

import pytest

from megarl.errors import UsageError
from megarl.flags.settings import Settings
from megarl.rewards.base import Sample, Score
from megarl.rewards.build import build_verifiers

ANSWERS = {  # the response asked about -> status, body and headers of the first and of later answers
    "number": [(200, {"scores": [0.25]}, {})],
    "object": [(200, {"scores": [
        {"reward": 2, "correct": False, "parts": {"a": 1.5, "b": 0.5}, "extracted": "x"}
    ]}, {})],
    "later": [(500, "", {}), (200, {"scores": [1]}, {})],
    "busy": [(429, "", {"Retry-After": "1"}), (200, {"scores": [1]}, {})],
    "never": [(503, "down", {})],
    "asleep": [(429, "", {"Retry-After": "3600"})],
    "refused": [(400, "no such task", {})],
    "moved": [(307, "", {"Location": "/elsewhere"})],
    "malformed": [(200, "{nope", {})],
    "two": [(200, {"scores": [1, 2]}, {})],
    "null": [(200, {"scores": [None]}, {})],
    "nan": [(200, {"scores": [float("nan")]}, {})],
    "parts": [(200, {"scores": [{"reward": 1, "parts": {"a": 2}}]}, {})],
    "correct": [(200, {"scores": [{"reward": 1, "correct": "yes"}]}, {})],
    "hangs": [], "drips": [],
}  # fmt: skip
SECONDS = 2.0


class Server(http.server.ThreadingHTTPServer):
    """Answers as ANSWERS says; keeps what it was asked, when, and how many requests it had at a time."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked, self.times, self.lock = [], {}, threading.Lock()
        self.open = self.most = 0
        self.url = f"http://127.0.0.1:{self.server_port}/score"


class Handler(http.server.BaseHTTPRequestHandler):
    """One request."""

    def do_POST(self):
        sample = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["samples"][0]
        name = sample["response"]
        with self.server.lock:
            self.server.asked.append(sample)
            earlier = self.server.times.setdefault(name, [])
            earlier.append(time.monotonic())
            self.server.open += 1
            self.server.most = max(self.server.most, self.server.open)
        try:
            self.answer(name, len(earlier))
        except OSError:
            pass  # the client has gone
        finally:
            with self.server.lock:
                self.server.open -= 1

    def answer(self, name: str, time_of: int):
        if name == "hangs":
            return time.sleep(2 * SECONDS)
        if name == "drips":
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            for _ in range(100):
                self.wfile.write(b" ")
                time.sleep(0.05)
        known = ANSWERS[name]
        status, body, headers = known[min(time_of, len(known)) - 1]
        data = (body if isinstance(body, str) else json.dumps(body)).encode()
        time.sleep(0.02)
        self.send_response(status)
        for key, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def server():
    with Server() as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


def remote(url: str, **flags):
    flags = {"retries": 2, "timeout": SECONDS, "fallback": -1.0} | flags
    return build_verifiers(Settings(reward="remote", reward_url=url, **{f"reward_{k}": v for k, v in flags.items()}))


def test_answers_retries_and_reasons(server, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # not asked for, so not used
    verifiers = remote(server.url, concurrency=5)
    started = time.monotonic()
    found = dict(zip(ANSWERS, verifiers.score([Sample("q", name) for name in ANSWERS])["remote"], strict=True))
    assert time.monotonic() - started < 3 * SECONDS  # 16 samples, 5 at a time, two of them hang
    verifiers.close()
    assert found["number"] == Score(0.25, False, extracted="number")
    assert found["object"] == Score(2.0, False, {"a": 1.5, "b": 0.5}, "x")
    assert found["later"] == Score(1.0, True, extracted="later")
    assert found["busy"] == Score(1.0, True, extracted="busy")
    scored = ("number", "object", "later", "busy")
    failed = [name for name in ANSWERS if name not in scored]
    assert [found[name] for name in failed] == [Score(-1.0, False)] * len(failed)
    reasons = dict(zip(failed, verifiers.failures["remote"], strict=True))
    for name, reason in {
        "never": "HTTP status 503: 'down', attempt 3 of 3", "asleep": "HTTP status 429: '', attempt 1; no time left",
        "refused": "HTTP status 400: 'no such task'", "moved": "HTTP status 307", "malformed": "the answer is '{nope'",
        "two": 'not {"scores": [one score]}', "null": "the score is None", "nan": "reward is nan, not a finite number",
        "parts": "do not add up", "correct": "correct is 'yes', not a boolean",
        "hangs": f"no answer within {SECONDS:g} s", "drips": f"no answer within {SECONDS:g} s",
    }.items():  # fmt: skip
        assert reason in reasons[name] and reasons[name].startswith("reward remote on prompt 'q': "), name
    attempts = Counter({name: len(times) for name, times in server.times.items()})
    assert attempts == Counter(dict.fromkeys(ANSWERS, 1) | {"later": 2, "busy": 2, "never": 3})
    assert server.times["busy"][1] - server.times["busy"][0] >= 1.0  # what Retry-After said
    first, second, third = server.times["never"]
    assert second - first >= 0.25 and third - second >= 0.5  # back-off
    assert 2 <= server.most <= 5


def test_what_is_sent(server):
    server.asked.clear()
    talk = [{"role": "user", "content": "é"}]
    verifiers = remote(server.url)
    verifiers.score([Sample("é", "number", "4", {"a": [1]}, False, talk, 7), Sample("q", "number")])
    verifiers.close()
    common = {"response": "number", "finished": False, "answer": "4", "metadata": {"a": [1]}}
    assert {"prompt": "é", "messages": talk, **common} in server.asked
    assert {"prompt": "q", "response": "number", "answer": None, "metadata": None, "finished": True} in server.asked


def test_no_server():
    verifiers = remote("http://127.0.0.1:9/score", retries=1)  # the port discard
    assert verifiers.score([Sample("q", "a")])["remote"] == [Score(-1.0, False)]
    (reason,) = verifiers.failures["remote"]
    assert "no connection" in reason and reason.endswith("Connection refused, attempt 2 of 2")
    verifiers.close()


@pytest.mark.parametrize("url", ["localhost:80/x", "ftp://host/x", "http://", "http://[::1"])
def test_addresses_that_are_none(url):
    with pytest.raises(UsageError) as caught:
        remote(url)
    assert str(caught.value).startswith(f"--reward-url {url}: not an address; allowed: http")
