"""The remote verifier against a real server: answers, retries, limits of time, and a reason for each failure."""

import http.server
import json
import threading
from collections import Counter

import pytest

from megarl.flags.settings import Settings
from megarl.rewards.base import Sample, Score
from megarl.rewards.chosen_verifiers import build_verifiers
from tests.helpers.worlds import SAFETY_SECONDS

ANSWERS = {  # the response asked about -> status, body and headers of the first and of later answers
    "number": [(200, {"scores": [0.25]}, {})],
    "object": [(200, {"scores": [
        {"reward": 2, "correct": False, "parts": {"a": 1.5, "b": 0.5}, "extracted": "x"}
    ]}, {})],
    "later": [(500, "", {}), (200, {"scores": [1]}, {})],
    "busy": [(429, "", {"Retry-After": "3"}), (200, {"scores": [1]}, {})],
    "never": [(503, "down", {})],
    "asleep": [(429, "", {"Retry-After": "99999"})],
    "refused": [(400, "no such task", {})],
    "moved": [(307, "", {"Location": "/elsewhere"})],
    "malformed": [(200, "{nope", {})],
    "two": [(200, {"scores": [1, 2]}, {})],
    "null": [(200, {"scores": [None]}, {})],
    "nan": [(200, {"scores": [float("nan")]}, {})],
    "parts": [(200, {"scores": [{"reward": 1, "parts": {"a": 2}}]}, {})],
    "correct": [(200, {"scores": [{"reward": 1, "correct": "yes"}]}, {})],
}  # fmt: skip
SECONDS = 0.5  # for an answer that never comes; all others have far more than they take on a slow machine
AT_A_TIME = 5


class Server(http.server.ThreadingHTTPServer):
    """Answers as ANSWERS says; records the requests and how many were open at a time.

    Besides ANSWERS: `hangs` gets no answer, `drips` endless single bytes, and `together` an answer only when AT_A_TIME
    requests for it have arrived.
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked, self.attempts, self.lock = [], Counter(), threading.Lock()
        self.together, self.closed = threading.Barrier(AT_A_TIME), threading.Event()
        self.open = self.most = 0
        self.url = f"http://127.0.0.1:{self.server_port}/score"


class Handler(http.server.BaseHTTPRequestHandler):
    """One request."""

    def do_POST(self):
        sample = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["samples"][0]
        name = sample["response"]
        with self.server.lock:
            self.server.asked.append(sample)
            self.server.attempts[name] += 1
            attempt = self.server.attempts[name]
            self.server.open += 1
            self.server.most = max(self.server.most, self.server.open)
        try:
            self.answer(name, attempt)
        except OSError:
            pass  # the client has gone

    def answer(self, name: str, attempt: int):
        if name == "hangs":
            self.server.closed.wait(SAFETY_SECONDS)
            return
        if name == "drips":
            self.send_response(200)
            self.send_header("Content-Length", str(1 << 23))
            self.end_headers()
            while not self.server.closed.wait(0.05):
                self.wfile.write(b" ")
            return
        if name == "together":
            self.server.together.wait(SAFETY_SECONDS)
        known = ANSWERS["number" if name == "together" else name]
        status, body, headers = known[min(attempt, len(known)) - 1]
        with self.server.lock:  # once it is answered, the client may send another
            self.server.open -= 1
        data = (body if isinstance(body, str) else json.dumps(body)).encode()
        self.send_response(status)
        for key, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    with Server() as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.closed.set()
        server.shutdown()


def remote(url: str, **flags):
    flags = {"retries": 2, "timeout": SAFETY_SECONDS, "fallback": -1.0} | flags
    return build_verifiers(Settings(reward="remote", reward_url=url, **{f"reward_{k}": v for k, v in flags.items()}))


class Clock:
    """The time of `megarl.rewards.remote`: it passes only in its own pauses, which are kept."""

    def __init__(self):
        self.now, self.pauses = 1000.0, []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float):
        self.pauses.append(seconds)
        self.now += seconds


def test_answers_retries_and_reasons(server, monkeypatch):
    """One sample after the other, so that it is known whose pauses they are."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # not asked for, so not used
    clock = Clock()
    monkeypatch.setattr("megarl.rewards.remote.time", clock)
    verifiers = remote(server.url, concurrency=1)
    found = dict(zip(ANSWERS, verifiers.score([Sample("q", name) for name in ANSWERS])["remote"], strict=True))
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
    }.items():  # fmt: skip
        assert reason in reasons[name] and reasons[name].startswith("reward remote on prompt 'q': "), name
    assert server.attempts == Counter(dict.fromkeys(ANSWERS, 1) | {"later": 2, "busy": 2, "never": 3})
    later, busy, *never = clock.pauses
    assert busy == 3.0  # what Retry-After said
    assert 0.25 <= later <= 0.5 and 0.25 <= never[0] <= 0.5 <= never[1] <= 1.0 and len(never) == 2  # back-off


def test_requests_without_an_answer_are_given_up(server):
    verifiers = remote(server.url, timeout=SECONDS)
    assert verifiers.score([Sample("q", name) for name in ("hangs", "drips")])["remote"] == [Score(-1.0, False)] * 2
    verifiers.close()
    for reason in verifiers.failures["remote"]:
        assert reason.startswith("reward remote on prompt 'q': ")
        assert f"no answer within {SECONDS:g} s, attempt 1;" in reason


def test_no_more_requests_at_a_time_than_allowed(server):
    """The server answers none of them before so many are there."""
    verifiers = remote(server.url, concurrency=AT_A_TIME)
    found = verifiers.score([Sample("q", "together")] * (3 * AT_A_TIME))["remote"]
    verifiers.close()
    assert found == [Score(0.25, False, extracted="together")] * len(found)
    assert server.most == AT_A_TIME


def test_the_request_body(server):
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
    assert "no connection" in reason and "Connection refused, attempt 2 of 2;" in reason
    verifiers.close()
