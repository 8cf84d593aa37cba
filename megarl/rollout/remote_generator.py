"""A generator elsewhere: the client of a generation server's `/generate` (`python -m megarl.serve`)."""

import itertools
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import urllib3
from urllib3.exceptions import HTTPError

from megarl.arguments import Settings
from megarl.errors import UsageError
from megarl.mcore.inference.generation import Completion, GenerationRequest
from megarl.observe import activity
from megarl.plain_files import read_text, reading

FLAG = "--rollout-server"
BATCH = 32  # requests in one HTTP request
CONNECTIONS = 8  # at a time for the requests of one call
MAX_CONNECTIONS = 64  # that stay open
BUSY = (429, 503)  # statuses of a server that asks to come later
MIN_PAUSE, MAX_PAUSE = 0.2, 5.0  # seconds


class RemoteGenerator:
    """Requests that a server answers, with the bits that an engine with its weights gives.

    It raises UsageError for what the server refuses, RuntimeError if it cannot answer.
    """

    def __init__(self, url: str, api_key: str | None = None, seconds: float = 3600.0):
        """
        Args:
            url: of the server, as 'http://host:8000'.
            seconds: that a request may take, with all of its attempts.
        """
        self.url, self._seconds = url.rstrip("/"), seconds
        self._api_key = api_key
        self._connections = urllib3.PoolManager(maxsize=MAX_CONNECTIONS, retries=False, cert_reqs="CERT_REQUIRED")

    @classmethod
    def of_settings(cls, settings: Settings) -> "RemoteGenerator":
        """The generator that `--rollout-server` names. UsageError for a wrong key file."""
        key, path = None, settings.rollout_server_key_file
        if path is not None:
            where = f"--rollout-server-key-file {path}"
            with reading(where):
                words = read_text(path).split()
            if not words or not (words[0].isascii() and words[0].isprintable()):
                raise UsageError(f"{where}: has no key of letters, digits and signs")
            key = words[0]
        return cls(settings.rollout_server, key)

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Returns one completion per request, in their order; several HTTP requests run at a time."""
        batches = _batches(requests)
        with activity.limited(), ThreadPoolExecutor(CONNECTIONS) as pool:
            answers = [*pool.map(self._generate, ([requests[number] for number in batch] for batch in batches))]
        joined = itertools.chain.from_iterable
        found = dict(zip(joined(batches), joined(answers), strict=True))
        return [found[number] for number in range(len(requests))]

    def _generate(self, requests: list[GenerationRequest]) -> list[Completion]:
        found = self._json(self._ask("POST", "/generate", request_body(requests)))
        if len(found) != len(requests):
            raise RuntimeError(f"{FLAG} {self.url}: the answer is not one of a generation server")
        return [_completion(result) for result in found]

    def _ask(self, method: str, path: str, body: Any = None, **options: Any) -> urllib3.BaseHTTPResponse:
        """The server's answer with status 200; waits while it is busy."""
        headers = {"Authorization": f"Bearer {self._api_key}"} if self._api_key else {}
        deadline, pause = time.monotonic() + self._seconds, MIN_PAUSE
        while True:
            timeout = urllib3.Timeout(total=max(deadline - time.monotonic(), 1.0))
            try:
                response = self._connections.request(
                    method, self.url + path, json=body, headers=headers, timeout=timeout, **options
                )
            except HTTPError as error:
                raise RuntimeError(f"{FLAG} {self.url}: no answer: {error}") from None
            if response.status == 200:
                return response
            wait = _pause_of(response, pause)
            if response.status not in BUSY or time.monotonic() + wait > deadline:
                raise self._error(response)
            pause = min(2 * pause, MAX_PAUSE)
            time.sleep(wait)

    def _error(self, response: urllib3.BaseHTTPResponse) -> Exception:
        try:
            message = json.loads(response.data)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            message = "the answer is not one of a generation server"
        kind = UsageError if 400 <= response.status < 500 else RuntimeError
        return kind(f"{FLAG} {self.url}: status {response.status}: {message}")

    def _json(self, response: urllib3.BaseHTTPResponse) -> Any:
        try:
            return json.loads(response.data)
        except ValueError:
            raise RuntimeError(f"{FLAG} {self.url}: the answer is not one of a generation server") from None


def _pause_of(response: urllib3.BaseHTTPResponse, default: float) -> float:
    try:
        return min(max(float(response.headers.get("Retry-After", default)), MIN_PAUSE), MAX_PAUSE)
    except ValueError:
        return default


def _batches(requests: Sequence[GenerationRequest]) -> list[tuple[int, ...]]:
    """Numbers of requests that differ in prompt and key alone, at most `BATCH` together."""
    alike: dict[tuple, list[int]] = {}
    for number, request in enumerate(requests):
        ends = request.end_ids, _stops_of(request), *_thinking_of(request).values()
        kind = request.sampling, request.max_new_tokens, request.top_logprobs, ends
        alike.setdefault(kind, []).append(number)
    return [batch for members in alike.values() for batch in itertools.batched(members, BATCH)]


def _stops_of(request: GenerationRequest) -> tuple[str, ...]:
    return () if request.stops is None else tuple(stop.decode() for stop in request.stops.stops)


def _thinking_of(request: GenerationRequest) -> dict[str, Any]:
    budget = request.thinking
    return {} if budget is None else {"thinking_budget": budget.limit, "thinking_budget_text": budget.text}


def request_body(requests: list[GenerationRequest]) -> dict[str, Any]:
    """The body of a request for `/generate`."""
    first = requests[0]
    if first.sampling is None or first.end_ids is None:
        raise ValueError("a request to a server needs its own sampling settings and end tokens")
    s = first.sampling
    return {
        "input_ids": [request.prompt for request in requests],
        "key": [request.key for request in requests],
        "top_logprobs": first.top_logprobs,
        "sampling_params": {
            "temperature": 0 if s.greedy else s.temperature,
            "top_k": s.top_k,
            "top_p": s.top_p,
            "min_p": s.min_p,
            "max_tokens": first.max_new_tokens,
            "stop": list(_stops_of(first)),
            "stop_token_ids": list(first.end_ids),
            "ignore_eos": True,  # the end tokens are exactly those of the request
            **_thinking_of(first),
        },
    }


def _completion(result: dict[str, Any]) -> Completion:
    top = result.get("top_logprobs")
    return Completion(
        tokens=result["output_ids"],
        logprobs=result["logprobs"],
        finished=result["finish_reason"] == "stop",
        top_logprobs=top and [[(token, logprob) for token, logprob in best] for best in top],
        versions=result["versions"],
    )
