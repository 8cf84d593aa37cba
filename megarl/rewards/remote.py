"""The verifier `remote`: a server that scores samples by HTTP, with time-outs, retries and bounded concurrency.

A request is a POST of `{"samples": [{"prompt", "response", "answer", "metadata", "finished"}]}` with one sample, and
its `messages` where the prompt is a conversation; the answer is `{"scores": [score]}`: a number, or an object with
`reward` and, where wanted, `correct` (default: reward >= 1), `parts` and `extracted`, as in `Score`.
"""

import json
import random
import time
from numbers import Real
from typing import Any

import urllib3
from urllib3.exceptions import HTTPError, NewConnectionError, ProtocolError, TimeoutError

from megarl.errors import UsageError
from megarl.rewards.base import Sample, Score

_AGAIN = (429, 500, 502, 503, 504)  # statuses of a server that may answer later
_LARGEST = 1 << 24  # bytes of an answer
_FIRST_PAUSE = 0.5  # seconds
_RANDOM = random.SystemRandom()  # the pauses must not move the run's own random numbers


class Remote:
    """Scores samples at `url`; `seconds` is what one may take in all, attempts and the waits between them included.

    Up to `retries` further attempts follow a refused or lost connection and the statuses 429, 500, 502, 503 and 504,
    after 0.5, 1, 2, ... seconds (up to half of it less, so that not all come at once) or what Retry-After says. No
    second attempt follows an answer that is late or wrong. Certificates of https are verified; redirects and proxies
    of the environment are not followed.
    UsageError for an address that is none.
    """

    def __init__(self, url: str, retries: int, concurrency: int, seconds: float):
        try:
            parsed = urllib3.util.parse_url(url)
        except HTTPError:
            parsed = urllib3.util.Url()
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise UsageError(f"--reward-url {url}: not an address; allowed: http://host:port/path, or https")
        self._url, self._retries, self._seconds = url, retries, seconds
        self._connections = urllib3.PoolManager(maxsize=concurrency, block=True, cert_reqs="CERT_REQUIRED")

    def __call__(self, sample: Sample) -> Score | float:
        """The server's score, its numbers not checked yet; for `concurrency` threads at a time.

        RuntimeError or ValueError with the reason why there is none.
        """
        fields = ("prompt", "response", "answer", "metadata", "finished")
        entry: dict[str, Any] = {name: getattr(sample, name) for name in fields}
        if sample.messages is not None:
            entry["messages"] = sample.messages
        return _score(self._answer(json.dumps({"samples": [entry]}).encode(), time.monotonic() + self._seconds))

    def _answer(self, body: bytes, deadline: float) -> bytes:
        """The body of an answer with status 200, after as many attempts as it takes and may be."""
        attempts = 0
        while True:
            attempts, wait = attempts + 1, None
            try:
                status, text, wait = self._attempt(body, deadline)
                if status == 200:
                    return text
                problem = f"HTTP status {status}: {text[:80].decode(errors='replace')!r}"
                if status not in _AGAIN:
                    raise RuntimeError(problem)
            except (NewConnectionError, ProtocolError) as error:
                problem = f"no connection: {error}"
            except TimeoutError:
                raise RuntimeError(f"no answer within {self._seconds:g} s, attempt {attempts}") from None
            except HTTPError as error:
                raise RuntimeError(f"{type(error).__name__}: {error}") from error
            if attempts > self._retries:
                raise RuntimeError(f"{problem}, attempt {attempts} of {1 + self._retries}")
            pause = _FIRST_PAUSE * 2.0 ** (attempts - 1) * _RANDOM.uniform(0.5, 1.0) if wait is None else wait
            if time.monotonic() + pause >= deadline:
                raise RuntimeError(f"{problem}, attempt {attempts}; no time left for another")
            time.sleep(pause)

    def _attempt(self, body: bytes, deadline: float) -> tuple[int, bytes, float | None]:
        """Status, body and Retry-After in seconds of one request. TimeoutError past the deadline."""
        response = self._connections.request(
            "POST", self._url, body=body, headers={"Content-Type": "application/json"}, retries=False, redirect=False,
            preload_content=False, timeout=urllib3.Timeout(total=max(deadline - time.monotonic(), 1e-3)),
        )  # fmt: skip
        text = bytearray()
        try:
            # A time-out of the socket is between two bytes: a server that sends them one by one must be stopped here.
            while piece := response.read1(1 << 16):
                text += piece
                if time.monotonic() >= deadline:
                    raise TimeoutError
                if len(text) > _LARGEST:
                    raise RuntimeError(f"an answer of more than {_LARGEST} bytes")
            return response.status, bytes(text), urllib3.Retry().get_retry_after(response)
        except BaseException:
            response.close()
            raise
        finally:
            response.release_conn()


def _score(answer: bytes) -> Score | float:
    """The one score in an answer. ValueError that says what is wrong with its form."""
    try:
        scores = json.loads(answer)["scores"]
        (score,) = scores
    except (ValueError, KeyError, TypeError, RecursionError):
        shown = answer[:80].decode(errors="replace")
        raise ValueError(f'the answer is {shown!r}, not {{"scores": [one score]}}') from None
    if isinstance(score, Real):
        return score
    reward = score.get("reward") if isinstance(score, dict) else None
    if not isinstance(reward, Real):
        raise ValueError(f"the score is {score!r:.80}, neither a number nor an object with a number as reward")
    correct = score.get("correct", reward >= 1.0)
    if not isinstance(correct, bool):
        raise ValueError(f"correct is {correct!r:.80}, not a boolean")
    return Score(float(reward), correct, score.get("parts") or {}, score.get("extracted"))
