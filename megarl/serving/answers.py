"""OpenAI's endpoints, for the server and for agents: answers, whole or as server-sent events; and of chat completions,
a request as chat templates read it."""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from typing import Any

from starlette.responses import Response

from megarl.data.messages import template_message, with_tool_names
from megarl.serving.error_answers import RequestError, invalid
from megarl.serving.schemas import AssistantMessage, ChatCompletionRequest, ImagePart, OpenAIFields, check_json

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


# -- chat completions --------------------------------------------------------------------------------------------------


def conversation(request: ChatCompletionRequest) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """(messages, tools that may be called) of a request; None: no call may be made. RequestError 400."""
    tools = [tool.function for tool in request.tools or ()]
    return template_messages(request.messages), offered(tools, request.tool_choice)


def template_messages(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Messages of a validated request as chat templates read them, with names of results of tools.

    RequestError 400 for arguments that are no JSON object.
    """
    return with_tool_names([_message(number, message) for number, message in enumerate(messages)])


def offered(tools: Sequence[Any] | None, choice: Any = None) -> list[dict[str, Any]] | None:
    """Tools as chat templates read them, without nulls and wishes to the server; None: no call may be made."""
    fields = [dict(name=tool.name, description=tool.description, parameters=tool.parameters) for tool in tools or ()]
    shown = [{name: value for name, value in each.items() if value is not None} for each in fields]
    return [{"type": "function", "function": each} for each in shown] if choice != "none" and shown else None


def joined_text(content: Any) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content or ())


def image_urls(messages: Sequence[Any]) -> list[str]:
    """The URLs of the images in messages of a validated request."""
    contents = [message.content for message in messages if isinstance(message.content, list)]
    return [part.image_url.url for content in contents for part in content if isinstance(part, ImagePart)]


def with_marks(messages: Sequence[Any], marks: Iterable[str]) -> list[Any]:
    """Messages in which the images are `marks`, in order; texts beside an image follow each other as in templates."""
    waiting, found = iter(marks), []
    for message in messages:
        if image_urls([message]):
            parts = (next(waiting) if isinstance(part, ImagePart) else part.text for part in message.content)
            message = message.model_copy(update={"content": "".join(parts)})
        found.append(message)
    return found


def _message(number: int, message: Any) -> dict[str, Any]:
    if image_urls([message]):
        raise invalid(f"messages: message {number} has an image, which is not read here", "messages")
    fields = message.model_dump(include={"role", "content", "name", "tool_call_id"})
    if isinstance(message, AssistantMessage):
        fields["reasoning_content"] = message.reasoning_content or message.reasoning or None
        calls = [(call.id, call.function) for call in message.tool_calls or ()]
        fields["tool_calls"] = [
            {"id": name, "function": {"name": called.name, "arguments": _arguments(number, called.arguments)}}
            for name, called in calls
        ]
    return template_message(fields)


def call_arguments(text: str) -> dict[str, Any] | None:
    """The arguments of a call from their text; None if they are no JSON object that the schemas allow."""
    try:
        arguments = check_json(json.loads(text or "{}"))
    except (ValueError, RecursionError):
        return None
    arguments = {} if arguments is None else arguments  # what clients send of a call without arguments
    return arguments if isinstance(arguments, dict) else None


def _arguments(number: int, text: str) -> dict[str, Any]:
    arguments = call_arguments(text)
    if arguments is None:
        raise invalid(f"messages: the arguments of a tool call in message {number} are no JSON object", "messages")
    return arguments


# -- answers -----------------------------------------------------------------------------------------------------------


class ChatAnswer(OpenAIAnswer):
    """The answer to one request with `count` choices; each part has a `delta`, the first of a choice its role."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, model: str, request: ChatCompletionRequest, count: int):
        super().__init__(model, request)
        self._count, self._wants_logprobs = count, bool(request.logprobs)

    def empty_choices(self) -> list[dict[str, Any]]:
        found = [dict(index=k, message=dict(role="assistant", content="", refusal=None)) for k in range(self._count)]
        return [{**each, "logprobs": {"content": []} if self._wants_logprobs else None} for each in found]

    def merge(self, choice: dict[str, Any], part: dict[str, Any]):
        message, delta = choice["message"], part["delta"]
        message["content"] += delta.get("content", "")
        if "reasoning_content" in delta:
            message["reasoning_content"] = message.get("reasoning_content", "") + delta["reasoning_content"]
        for call in delta.get("tool_calls", ()):
            message.setdefault("tool_calls", []).append({name: call[name] for name in ("id", "type", "function")})
        if part["logprobs"] is not None:
            choice["logprobs"]["content"] += part["logprobs"]["content"]
        if part["finish_reason"] and "tool_calls" in message:
            message["content"] = message["content"] or None
        super().merge(choice, part)


def chat_part(
    index: int,
    delta: dict[str, Any],
    finish: str | None = None,
    has_calls: bool = False,
    logprobs: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """A part of a choice. `finish`: "stop", "length" or "abort", with the last one; `has_calls`: of the choice."""
    reason = "tool_calls" if finish == "stop" and has_calls else finish
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


def delta_of(content: str, reasoning: str, calls: Sequence[dict[str, Any]], first: int = 0) -> dict[str, Any]:
    """What a text adds to a choice. `first`: the number of the first of these calls."""
    texts = {"content": content, "reasoning_content": reasoning}
    delta: dict[str, Any] = {name: text for name, text in texts.items() if text}
    if calls:
        delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(calls, start=first)]
    return delta
