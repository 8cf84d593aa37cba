"""One HTTP request's requests to leaders, as a context: leaving it ends those that still run."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence

from megarl.serving.errors import timed_out
from megarl.serving.links import Message
from megarl.serving.replica_pool import ReplicaPool, RequestUpdate


class Submission:
    """Submits messages when entered; `updates` gives what the leaders say, until each has finished.

    A consumer that is slow makes the updates wait here; they are at most `max_tokens` for each request.
    """

    def __init__(self, pool: ReplicaPool, messages: Sequence[Message], session: str | None):
        self._pool, self._messages, self._session = pool, messages, session
        self._updates: asyncio.Queue[tuple[int, RequestUpdate]] = asyncio.Queue()
        self._indices: dict[int, int] = {}  # id -> index of its message, of those that have not finished
        self._last: dict[int, float] = {}  # id -> when its last tokens came
        self._start = time.monotonic()
        self._deadline = asyncio.get_running_loop().time() + pool.seconds

    def __enter__(self) -> "Submission":
        """Submits. Raises RequestError as `ReplicaPool.submit`."""
        ids = self._pool.submit(self._messages, self._session, self._updates)
        self._indices = {number: index for index, number in enumerate(ids)}
        prompts = (len(message["prompt"]) for message in self._messages if message["type"] == "generate")
        self._pool.metrics.prompt_tokens.inc(sum(prompts))
        return self

    def __exit__(self, *_):
        self._pool.abort(list(self._indices))
        self._indices.clear()

    def end(self, index: int):
        """Ends one request early, that of the message with this index."""
        ended = [number for number, each in self._indices.items() if each == index]
        self._pool.abort(ended)
        for number in ended:
            del self._indices[number]

    async def updates(self) -> AsyncIterator[tuple[int, RequestUpdate]]:
        """(index of the message, update), in the order of their arrival. RequestError if one fails, or time is up."""
        while self._indices:
            try:
                async with asyncio.timeout_at(self._deadline):
                    number, update = await self._updates.get()
            except TimeoutError:
                raise timed_out(self._pool.seconds) from None
            index = self._indices.get(number)
            if index is None:
                continue
            if update.is_last:
                del self._indices[number]
            if update.error is not None:
                raise update.error
            if update.kind == "tokens" and update.tokens:
                self._measure(number, len(update.tokens))
            yield index, update

    def _measure(self, number: int, tokens: int):
        metrics, now = self._pool.metrics, time.monotonic()
        metrics.generated_tokens.inc(tokens)
        if number in self._last:
            metrics.between_tokens.observe((now - self._last[number]) / tokens)
        else:
            metrics.first_token.observe(now - self._start)
        self._last[number] = now
