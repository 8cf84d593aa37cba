"""Answers of OpenAI's endpoints, whole or as server-sent events, for the server and for agents."""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from starlette.responses import Response

from megarl.serving.error_answers import RequestError
from megarl.serving.schemas import OpenAIFields

MIN_LOGPROB = -9999.0  # in place of minus infinity, which JSON lacks
Parts = AsyncGenerator[dict[str, Any], None]

_GRACE = 60.0  # seconds that a slow reader gets after the request's own time


def finite(logprob: float | None) -> float | None:
    """A log-prob that JSON can hold."""
    return logprob if logprob is None or logprob > MIN_LOGPROB else MIN_LOGPROB


class OpenAIAnswer:
    """The answer to one request: parts of its choices, which are streamed or merged. `more`: its further fields."""

    kind = chunk_kind = prefix = ""  # `object` of the whole answer and of a chunk, beginning of `id`

    def __init__(self, model: str, request: OpenAIFields):
        self._model, self._id, self._created = model, f"{self.prefix}-{secrets.token_hex(16)}", int(time.time())
        self._with_usage = bool(request.stream_options and request.stream_options.include_usage)
        self.more: dict[str, Any] = {}
        self.prompt_tokens = self.generated_tokens = 0

    def parts(self) -> Parts:
        """Parts of choices as they come; those of one choice, merged, are the choice."""
        raise NotImplementedError

    def empty_choices(self) -> list[dict[str, Any]]:
        """All choices before their first part."""
        raise NotImplementedError

    def merge(self, choice: dict[str, Any], part: dict[str, Any]):
        """Appends a part to a choice."""
        choice |= {name: part[name] for name in ("finish_reason", "stop_reason") if name in part}

    async def whole(self) -> dict[str, Any]:
        """The answer, when all of it is there."""
        choices = self.empty_choices()
        async with aclosing(self.parts()) as parts:
            async for part in parts:
                self.merge(choices[part["index"]], part)
        return self._envelope(self.kind, choices) | {"usage": self._usage}

    async def chunks(self) -> Parts:
        """The objects of a stream."""
        async with aclosing(self.parts()) as parts:
            async for part in parts:
                chunk = self._envelope(self.chunk_kind, [part])
                yield {**chunk, "usage": None} if self._with_usage else chunk
        if self._with_usage:
            yield {**self._envelope(self.chunk_kind, []), "usage": self._usage}

    def _envelope(self, kind: str, choices: Sequence[Any]) -> dict[str, Any]:
        head = {"id": self._id, "object": kind, "created": self._created, "model": self._model}
        return {**head, **self.more, "choices": choices}

    @property
    def _usage(self) -> dict[str, int]:
        prompt, generated = self.prompt_tokens, self.generated_tokens
        return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}


# -- server-sent events ------------------------------------------------------------------------------------------------


def event(content: Any, name: str | None = None) -> bytes:
    """One event, perhaps with a name. A lone surrogate becomes its escape in JSON."""
    head = b"" if name is None else f"event: {name}\n".encode()
    written = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    return head + b"data: " + written.encode(errors="backslashreplace") + b"\n\n"


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
