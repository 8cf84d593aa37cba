"""Answers as server-sent events."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.responses import Response

from megarl.serving.errors import RequestError

Parts = AsyncGenerator[dict[str, Any], None]

_GRACE = 60.0  # seconds that a slow reader gets after the request's own time


def event(content: Any) -> bytes:
    """One event. A lone surrogate becomes its escape in JSON."""
    written = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    return b"data: " + written.encode(errors="backslashreplace") + b"\n\n"


class EventStream(Response):
    """Sends each part as an event, then [DONE]; an error in between is an event, too.

    Whatever ends it closes the generator of the parts, which ends what the replicas do for it.
    """

    media_type = "text/event-stream"  # type: ignore[assignment]  # None in Response

    def __init__(self, first: dict[str, Any] | None, parts: Parts, seconds: float):
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._first, self._parts, self._seconds = first, parts, seconds

    async def __call__(self, scope, receive, send):
        try:
            async with asyncio.timeout(self._seconds + _GRACE), aclosing(self._parts) as parts:
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                try:
                    if self._first is not None:
                        await _send(send, event(self._first))
                    async for part in parts:
                        await _send(send, event(part))
                except RequestError as error:
                    await _send(send, event(error.content))
                await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})
        except TimeoutError:
            return  # the connection is closed in the middle of the answer


async def _send(send, body: bytes):
    await send({"type": "http.response.body", "body": body, "more_body": True})


async def start_stream(parts: Parts, seconds: float) -> EventStream:
    """A stream whose status is known: it begins with its first part, so an error before it is an error answer."""
    return EventStream(await anext(parts, None), parts, seconds)
