"""The verifier `remote`: a server that scores samples by HTTP, with time-outs, retries and bounded concurrency.

A request is a POST of `{"samples": [{"prompt", "response", "answer", "metadata", "finished"}]}` with one sample,
perhaps with `messages` and `turns`. The answer is `{"scores": [score]}`: a number, or an object with `reward` and,
optionally, `correct` (default: reward >= 1), `parts` and `extracted`, as in `Score`.
"""

import json
import random
import time
from typing import Any

import urllib3
from urllib3.exceptions import HTTPError, NewConnectionError, ProtocolError, TimeoutError

from megarl.observe.files import json_bytes
from megarl.rewards.base import BuiltIn, Sample, Score

_RETRIED = (429, 500, 502, 503, 504)  # statuses of a server that may answer later
_MAX_ANSWER = 1 << 24  # bytes
_FIRST_PAUSE = 0.5  # seconds
_RANDOM = random.SystemRandom()  # so that the pauses do not advance the run's random state


class Remote:
    """Scores samples at `url`; `seconds` limits one sample, including all its attempts and pauses.

    Up to `retries` further attempts follow a refused or lost connection and the statuses 429, 500, 502, 503 and 504,
    after 0.5, 1, 2, ... seconds (randomly shortened by up to half) or after Retry-After. A late or malformed answer is
    not retried. Certificates of https are verified; redirects and proxies of the environment are ignored.
    """

    def __init__(self, url: str, retries: int, concurrency: int, seconds: float):
        self._url, self._retries, self._seconds = url, retries, seconds
        self._connections = urllib3.PoolManager(maxsize=concurrency, block=True, cert_reqs="CERT_REQUIRED")

    def __call__(self, sample: Sample) -> Score | float:
        """The server's score, with unchecked numbers; for up to `concurrency` threads at a time. RuntimeError or
        ValueError with the reason if it has none.
        """
        fields = ("prompt", "response", "answer", "metadata", "finished")
        entry: dict[str, Any] = {name: getattr(sample, name) for name in fields}
        if sample.messages is not None:
            entry["messages"] = sample.messages
        if len(sample.turns) > 1:
            entry["turns"] = sample.turns
        return _score(self._answer(json_bytes({"samples": [entry]}), time.monotonic() + self._seconds))

    def _answer(self, body: bytes, deadline: float) -> bytes:
        """The body of the first answer with status 200, within the allowed attempts."""
        attempts = 0
        while True:
            attempts, wait = attempts + 1, None
            try:
                status, text, wait = self._attempt(body, deadline)
                if status == 200:
                    return text
                problem = f"HTTP status {status}: {text[:80].decode(errors='replace')!r}"
                if status not in _RETRIED:
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
        timeout = urllib3.Timeout(total=max(deadline - time.monotonic(), 1e-3))
        headers = {"Content-Type": "application/json"}
        options: dict[str, Any] = dict(headers=headers, preload_content=False, retries=False)
        response = self._connections.request("POST", self._url, body=body, timeout=timeout, redirect=False, **options)
        text = bytearray()
        try:
            # The socket's time-out applies to each read, so a server that sends slowly must be stopped here.
            while chunk := response.read1(1 << 16):
                text += chunk
                if time.monotonic() >= deadline:
                    raise TimeoutError
                if len(text) > _MAX_ANSWER:
                    raise RuntimeError(f"an answer of more than {_MAX_ANSWER} bytes")
            return response.status, bytes(text), urllib3.Retry().get_retry_after(response)
        except BaseException:
            response.close()
            raise
        finally:
            response.release_conn()


def _score(answer: bytes) -> Score | float:
    """The one score in an answer; ValueError if it is malformed."""
    try:
        scores = json.loads(answer)["scores"]
        (score,) = scores
    except (ValueError, KeyError, TypeError, RecursionError):
        shown = answer[:80].decode(errors="replace")
        raise ValueError(f'the answer is {shown!r}, not {{"scores": [one score]}}') from None
    if isinstance(score, (int, float)):
        return score
    reward = score.get("reward") if isinstance(score, dict) else None
    if not isinstance(reward, (int, float)):
        raise ValueError(f"the score is {score!r:.80}, neither a number nor an object with a number as reward")
    correct = score.get("correct", reward >= 1.0)
    if not isinstance(correct, bool):
        raise ValueError(f"correct is {correct!r:.80}, not a boolean")
    return Score(reward, correct, score.get("parts") or {}, extracted=score.get("extracted"))


REMOTE = BuiltIn(
    lambda options: Remote(options.url, options.retries, options.concurrency, options.timeout),
    limited=False,
    threads="concurrency",
)
