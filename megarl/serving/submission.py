"""One HTTP request's requests to leaders, as a context: leaving it ends those that still run."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence

from megarl.serving.dispatch import Dispatcher, News
from megarl.serving.errors import timed_out
from megarl.serving.wire import Frame


class Submission:
    """Submits frames when entered; `news` gives what the leaders say, until each has finished.

    A consumer that is slow makes the news wait here; they are at most `max_tokens` for each frame.
    """

    def __init__(self, dispatcher: Dispatcher, frames: Sequence[Frame], session: str | None, seconds: float):
        self._dispatcher, self._frames, self._session, self._seconds = dispatcher, frames, session, seconds
        self._queue: asyncio.Queue[tuple[int, News]] = asyncio.Queue()
        self._open: dict[int, int] = {}  # id -> index of its frame
        self._last: dict[int, float] = {}
        self._start = time.monotonic()
        self._deadline = asyncio.get_running_loop().time() + seconds

    def __enter__(self) -> "Submission":
        """Submits. Raises RequestError as `Dispatcher.submit`."""
        ids = self._dispatcher.submit(self._frames, self._session, lambda *item: self._queue.put_nowait(item))
        self._open = dict(zip(ids, range(len(ids)), strict=True))
        prompts = (len(frame["prompt"]) for frame in self._frames if frame["type"] == "generate")
        self._dispatcher.metrics.prompt_tokens.inc(sum(prompts))
        return self

    def __exit__(self, *_):
        self._dispatcher.abort(list(self._open))
        self._open.clear()

    def end(self, index: int):
        """Ends one request early, that of the frame with this index."""
        ended = [number for number, each in self._open.items() if each == index]
        self._dispatcher.abort(ended)
        for number in ended:
            del self._open[number]

    async def news(self) -> AsyncIterator[tuple[int, News]]:
        """(index of the frame, news), in the order of their arrival. RequestError if one fails, or time is up."""
        while self._open:
            try:
                async with asyncio.timeout_at(self._deadline):
                    number, news = await self._queue.get()
            except TimeoutError:
                raise timed_out(self._seconds) from None
            index = self._open.get(number)
            if index is None:
                continue
            if news.is_last:
                del self._open[number]
            if news.error is not None:
                raise news.error
            self._observe(number, news)
            yield index, news

    def _observe(self, number: int, news: News):
        if not news.tokens or news.kind != "tokens":
            return
        metrics, now = self._dispatcher.metrics, time.monotonic()
        metrics.generated_tokens.inc(len(news.tokens))
        if number in self._last:
            metrics.between_tokens.observe((now - self._last[number]) / len(news.tokens))
        else:
            metrics.first_token.observe(now - self._start)
        self._last[number] = now
