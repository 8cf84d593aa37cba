"""A client of a generation server that streams and has an admin key, and what many chunks are together."""

import contextlib
import json
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import Full, Queue
from threading import Event

import urllib3
from urllib3.exceptions import HTTPError

from megarl.mcore.inference.generation import Completion, GenerationRequest, TokenChunk
from megarl.rollout.remote_generator import RemoteGenerator, request_body

STREAMS = 16  # at once
UNREAD = 100  # chunks that may wait for the caller; then requests wait, too, those after the first `STREAMS` unsent


def completions_of(chunks: Iterable[TokenChunk], count: int) -> list[Completion]:
    """The completions of requests 0 … count − 1 from all of their chunks; each must have a last one."""
    found: list[list[TokenChunk]] = [[] for _ in range(count)]
    for chunk in chunks:
        found[chunk.number].append(chunk)
    assert all(of and of[-1].finish_reason for of in found)
    return [_completion(of) for of in found]


def _completion(chunks: list[TokenChunk]) -> Completion:
    top = None
    if any(chunk.top_logprobs is not None for chunk in chunks):
        top = [best for chunk in chunks for best in chunk.top_logprobs or []]
    return Completion(
        tokens=[token for chunk in chunks for token in chunk.tokens],
        logprobs=[logprob for chunk in chunks for logprob in chunk.logprobs],
        finished=chunks[-1].finish_reason == "stop",
        routes=chunks[-1].routes,
        top_logprobs=top,
        versions=[chunk.version for chunk in chunks for _ in chunk.tokens],
    )


class ServerClient(RemoteGenerator):
    """What a server can be asked besides whole completions."""

    def __init__(self, url: str, api_key: str | None = None, seconds: float = 3600.0, admin_key: str | None = None):
        super().__init__(url, api_key, seconds)
        self._connections = urllib3.PoolManager(maxsize=STREAMS, retries=False)
        self._admin = RemoteGenerator(url, admin_key, seconds)

    @property
    def version(self) -> int:
        return self._json(self._ask("GET", "/ready"))["version"]

    def pause(self, mode: str = "keep"):
        """Pauses the server for all of its clients; its streams go on after `resume`."""
        self._admin._ask("POST", f"/admin/pause?mode={mode}")

    def resume(self):
        self._admin._ask("POST", "/admin/resume")

    def update_weights(self, path: str) -> int:
        """Has the server load weights, by their path there. Returns the new version."""
        return self._json(self._admin._ask("POST", "/admin/weights", {"path": path}))["version"]

    def stream(self, requests: Sequence[GenerationRequest]) -> Iterator[TokenChunk]:
        """Yields the tokens of requests, numbered from 0, as they come. Closing the iterator drops the rest.

        While the caller does not read, at most `STREAMS` requests run, however fast the server is.
        """
        chunks: Queue[TokenChunk | Exception | None] = Queue(UNREAD)
        ends = Event()
        with ThreadPoolExecutor(STREAMS) as pool:
            try:
                for item in enumerate(requests):
                    pool.submit(self._follow, *item, chunks, ends)
                for _ in requests:
                    while (chunk := chunks.get()) is not None:
                        if isinstance(chunk, Exception):
                            raise chunk
                        yield chunk
            finally:
                ends.set()

    def _follow(self, number: int, request: GenerationRequest, chunks: Queue, ends: Event):
        """Puts the chunks of one request, then None; an exception that ends it before that."""

        def put(item):
            while not ends.is_set():
                with contextlib.suppress(Full):
                    return chunks.put(item, timeout=0.1)

        try:
            body = request_body([request]) | {"stream": True}
            response = self._ask("POST", "/generate", body, preload_content=False)
            for line in _lines(response):
                if ends.is_set() or line == b"data: [DONE]":
                    break
                if line.startswith(b"data: "):
                    result = json.loads(line[6:])
                    if "error" in result:
                        raise RuntimeError(result["error"]["message"])
                    if result["output_ids"] or result["finish_reason"]:
                        put(_chunk(number, result))
            response.close()  # the server drops the request unless it has ended
        except HTTPError as error:
            put(RuntimeError(f"the answer broke off: {error}"))
        except Exception as error:
            put(error)
        put(None)


def _lines(response) -> Iterator[bytes]:
    """The lines of a response as they come."""
    rest = b""
    for data in response.stream(2**16):
        *lines, rest = (rest + data).split(b"\n")
        yield from lines


def _chunk(number: int, result: dict) -> TokenChunk:
    top = result.get("top_logprobs")
    top = top and [[tuple(each) for each in best] for best in top]
    version = (result["versions"] or [0])[-1]
    return TokenChunk(number, result["output_ids"], result["logprobs"], top, result["finish_reason"], version=version)
