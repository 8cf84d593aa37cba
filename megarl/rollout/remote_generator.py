"""A generator elsewhere: the client of a generation server's `/generate` and `/admin` (`python -m megarl.serve`)."""

import base64
import json
import queue
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import urllib3
from urllib3.exceptions import HTTPError

from megarl.arguments import Settings
from megarl.errors import UsageError
from megarl.mcore.inference.generation import Completion, GenerationRequest, TokenChunk
from megarl.observe import activity
from megarl.rollout.api import PauseMode

FLAG = "--rollout-server"
BATCH = 32  # requests in one HTTP request of `generate`
CONNECTIONS = 8  # of `generate`
STREAMS = 64  # connections of `stream`, one a request
BUSY = (429, 503)  # statuses of a server that asks to come later
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 5.0  # seconds


class RemoteGenerator:
    """A `Generator` whose requests a server answers, with the bits that an engine with its weights gives.

    It raises UsageError for what the server refuses, RuntimeError if it cannot answer.
    """

    def __init__(
        self, url: str, api_key: str | None = None, admin_key: str | None = None, seconds: float = 3600.0
    ):  # fmt: skip
        """
        Args:
            url: of the server, as 'http://host:8000'.
            admin_key: for `pause`, `resume` and `update_weights`.
            seconds: that a request may take, with all of its attempts.
        """
        self._url, self._seconds = url.rstrip("/"), seconds
        self._api_key, self._admin_key = api_key, admin_key
        self._connections = urllib3.PoolManager(maxsize=STREAMS, retries=False, cert_reqs="CERT_REQUIRED")
        self._dropped: set[int] = set()
        self._ends = threading.Event()

    @classmethod
    def of_settings(cls, settings: Settings) -> "RemoteGenerator":
        """The generator that `--rollout-server` names. UsageError for a wrong key file."""
        key, path = None, settings.rollout_server_key_file
        if path is not None:
            try:
                key = Path(path).read_text(encoding="utf-8").split()[0]
            except (OSError, UnicodeDecodeError, IndexError):
                raise UsageError(f"--rollout-server-key-file {path}: no readable file with a key") from None
        return cls(settings.rollout_server, key)

    @property
    def version(self) -> int:
        """Of the server's weights now."""
        return self._json(self._ask("GET", "/ready"))["version"]

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Returns one completion per request, in their order; several HTTP requests run at a time."""
        batches = _batches(requests)
        done: list[Completion | None] = [None] * len(requests)
        with activity.limited(), ThreadPoolExecutor(CONNECTIONS) as pool:
            answers = pool.map(self._generate, ([requests[number] for number in batch] for batch in batches))
            for batch, completions in zip(batches, answers, strict=True):
                for number, completion in zip(batch, completions, strict=True):
                    done[number] = completion
        return done

    def _generate(self, requests: list[GenerationRequest]) -> list[Completion]:
        """The completions of requests that differ in prompt and key alone."""
        found = self._json(self._ask("POST", "/generate", _body(requests)))
        return [_completion(result) for result in found]

    def stream(self, requests: Sequence[GenerationRequest]) -> Iterator[TokenChunk]:
        """Yields the tokens of requests, numbered from 0, as they come. Closing the iterator drops the rest."""
        chunks: queue.SimpleQueue[TokenChunk | Exception | None] = queue.SimpleQueue()
        self._dropped, self._ends = set(), threading.Event()
        with ThreadPoolExecutor(STREAMS) as pool:
            try:
                for item in enumerate(requests):
                    pool.submit(self._follow, *item, chunks)
                for _ in requests:
                    while (chunk := chunks.get()) is not None:
                        if isinstance(chunk, Exception):
                            raise chunk
                        if chunk.number not in self._dropped:
                            yield chunk
            finally:
                self._ends.set()

    def _follow(self, number: int, request: GenerationRequest, chunks: queue.SimpleQueue):
        """Puts the chunks of one request, then None; an exception that ends it before that."""
        try:
            if not self._is_over(number):
                response = self._ask("POST", "/generate", _body([request]) | {"stream": True}, preload_content=False)
                try:
                    self._read_events(number, response, chunks)
                finally:
                    response.close()  # the server drops the request unless it has ended
        except HTTPError as error:
            chunks.put(RuntimeError(f"{FLAG} {self._url}: the answer broke off: {error}"))
        except Exception as error:
            chunks.put(error)
        chunks.put(None)

    def _is_over(self, number: int) -> bool:
        return self._ends.is_set() or number in self._dropped

    def _read_events(self, number: int, response: urllib3.BaseHTTPResponse, chunks: queue.SimpleQueue):
        routes = None
        for line in _lines(response):
            if self._is_over(number) or line == b"data: [DONE]":
                return
            if not line.startswith(b"data: "):
                continue
            result = json.loads(line[6:])
            if "error" in result:
                raise RuntimeError(f"{FLAG} {self._url}: {result['error']['message']}")
            routes = _routes(result) if result.get("routes") else routes
            if result["output_ids"] or result["finish_reason"]:
                chunks.put(_chunk(number, result, routes))

    def abort(self, numbers: Iterable[int]):
        """Drops requests of the present `stream`; nothing more is yielded of them."""
        self._dropped |= set(numbers)

    def pause(self, mode: PauseMode = "keep") -> list[TokenChunk]:
        """Pauses the server for all of its clients; its streams continue after `resume`. Returns no chunks."""
        self._ask("POST", f"/admin/pause?mode={mode}")
        return []

    def resume(self):
        """Continues after `pause`."""
        self._ask("POST", "/admin/resume")

    def update_weights(self, path: str) -> int:
        """Has the server load weights, by their path there. Returns the new version."""
        return self._json(self._ask("POST", "/admin/weights", {"path": path}))["version"]

    def shut_down(self):
        """Drops all requests and closes the connections; the server stays."""
        self._ends.set()
        self._connections.clear()

    def _ask(self, method: str, path: str, body: Any = None, preload_content: bool = True):
        """The server's answer with status 200; waits while it is busy."""
        key = self._admin_key if path.startswith("/admin") else self._api_key
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        deadline, pause = time.monotonic() + self._seconds, FIRST_PAUSE
        while True:
            try:
                response = self._connections.request(
                    method, self._url + path, json=body, headers=headers, preload_content=preload_content,
                    timeout=urllib3.Timeout(total=max(deadline - time.monotonic(), 1.0)),
                )  # fmt: skip
            except HTTPError as error:
                raise RuntimeError(f"{FLAG} {self._url}: no answer: {error}") from None
            if response.status == 200:
                return response
            wait = _pause_of(response, pause)
            if response.status not in BUSY or time.monotonic() + wait > deadline:
                raise self._error(response)
            pause = min(2 * pause, LONGEST_PAUSE)
            time.sleep(wait)

    def _error(self, response: urllib3.BaseHTTPResponse) -> Exception:
        try:
            message = json.loads(response.data)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            message = "the answer is not one of a generation server"
        kind = UsageError if 400 <= response.status < 500 else RuntimeError
        return kind(f"{FLAG} {self._url}: status {response.status}: {message}")

    def _json(self, response: urllib3.BaseHTTPResponse) -> Any:
        try:
            return json.loads(response.data)
        except ValueError:
            raise RuntimeError(f"{FLAG} {self._url}: the answer is not one of a generation server") from None


def _pause_of(response: urllib3.BaseHTTPResponse, default: float) -> float:
    try:
        return min(max(float(response.headers.get("Retry-After", default)), FIRST_PAUSE), LONGEST_PAUSE)
    except ValueError:
        return default


def _batches(requests: Sequence[GenerationRequest]) -> list[list[int]]:
    """Numbers of requests that differ in prompt and key alone, at most `BATCH` together."""
    alike: dict[tuple, list[int]] = {}
    for number, request in enumerate(requests):
        kind = request.sampling, request.end_ids, request.max_new_tokens, request.top_logprobs
        alike.setdefault(kind, []).append(number)
    return [members[i : i + BATCH] for members in alike.values() for i in range(0, len(members), BATCH)]


def _body(requests: list[GenerationRequest]) -> dict[str, Any]:
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
            "max_tokens": first.max_new_tokens,
            "stop_token_ids": list(first.end_ids),
            "ignore_eos": True,  # the end tokens are exactly those of the request
        },
    }


def _lines(response: urllib3.BaseHTTPResponse) -> Iterator[bytes]:
    """The lines of a response as they come."""
    rest = b""
    for data in response.stream(2**16):
        *lines, rest = (rest + data).split(b"\n")
        yield from lines


def _routes(result: dict[str, Any]) -> torch.Tensor:
    routes = np.frombuffer(base64.b64decode(result["routes"]["data"]), dtype="<i2")
    return torch.from_numpy(routes.astype(np.int16)).view(result["routes"]["shape"])


def _top(result: dict[str, Any]) -> list[list[tuple[int, float]]] | None:
    top = result.get("top_logprobs")
    return top and [[(token, logprob) for token, logprob in best] for best in top]


def _chunk(number: int, result: dict[str, Any], routes: torch.Tensor | None) -> TokenChunk:
    versions, finish = result["versions"], result["finish_reason"]
    version = versions[-1] if versions else 0
    return TokenChunk(
        number, result["output_ids"], result["logprobs"], _top(result), finish, routes if finish else None, version
    )


def _completion(result: dict[str, Any]) -> Completion:
    return Completion(
        tokens=result["output_ids"],
        logprobs=result["logprobs"],
        finished=result["finish_reason"] == "stop",
        routes=_routes(result) if result.get("routes") else None,
        top_logprobs=_top(result),
        versions=result["versions"],
    )
