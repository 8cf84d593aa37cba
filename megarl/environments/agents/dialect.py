"""What the dialects of an agent's endpoint share: images, turns of the policy, tokens, streams and errors."""

import asyncio
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import BaseModel
from starlette.responses import Response

from megarl.environments.agents.session import Session
from megarl.environments.calls import Ask, Reply
from megarl.errors import UsageError
from megarl.serving.answers import event
from megarl.serving.error_answers import JSONResponse, RequestError, invalid

ANTHROPIC = "/v1/messages"

_TEXTS = ("text", "input_text", "output_text")  # types of parts
_UNREAD = {"type", "cache_control", "prompt_cache_breakpoint"}  # fields of a part without effect

_said: set[str] = set()  # fields without effect that this process has named


async def without_images(session: Session, request: Any) -> Any:
    """The JSON of a request with a mark of the session for each image. Texts beside an image follow each other as in
    templates. RequestError 400 for an image that cannot be read; what is none is left to the schema.
    """
    name = next((name for name in ("messages", "input") if isinstance(request, dict) and name in request), "")
    if not isinstance(messages := request.get(name) if name else None, list):
        return request
    try:
        return {**request, name: [await _marked(session, message) for message in messages]}
    except UsageError as error:
        raise invalid(f"{name}: {error}", name) from None


async def _marked(session: Session, message: Any) -> Any:
    if not isinstance(message, dict) or message.get("role") == "assistant":
        return message
    lists = [name for name in ("content", "output") if isinstance(message.get(name), list)]
    return {**message, **{name: await _joined(session, message[name]) for name in lists}}


async def _joined(session: Session, parts: list[Any]) -> list[Any]:
    parts = [await _marked(session, part) if _type(part) == "tool_result" else part for part in parts]
    urls = [_url_of(part) for part in parts]
    if not any(url is not None for url in urls):
        return parts
    texts, others = [], []
    for part, url in zip(parts, urls, strict=True):
        is_text = _type(part) in _TEXTS and part.keys() <= _UNREAD | {"text"} and isinstance(part.get("text"), str)
        if url is None and not is_text:
            others.append(part)
        else:
            texts.append(part["text"] if url is None else await session.mark(url))
    kind = "input_text" if any(_type(part).startswith("input_") for part in parts) else "text"
    return [*others, {"type": kind, "text": "".join(texts)}]


def _type(part: Any) -> str:
    return str(part.get("type")) if isinstance(part, dict) else ""


def _url_of(part: Any) -> str | None:
    """The URL of a part that is an image in one of the dialects; None: it is none."""
    match part:
        case {"type": "image_url", "image_url": {"url": str(url), **more}, **rest}:
            known = more.keys() <= {"detail"}
        case {"type": "input_image", "image_url": str(url), **rest}:
            rest.pop("detail", None)
            known = rest.pop("file_id", None) is None
        case {"type": "image", "source": {"type": "base64", **source}, **rest}:
            url = f"data:{source.get('media_type')};base64,{source.get('data')}"
            known = source.keys() == {"media_type", "data"}
        case {"type": "image", "source": {"type": "url", "url": str(url), **more}, **rest}:
            known = not more
        case _:
            return None
    return url if known and rest.keys() <= _UNREAD else None


async def turns(
    session: Session, ask: Ask, request: BaseModel, ignored: Sequence[str], tool_choice: Any, count: int = 1
) -> list[Reply]:
    """The policy's next turn, `count` times. RequestError 400 for what the run's budgets, or the template, refuse.

    That a set field of `ignored`, or a choice that requires a call, has no effect is said once in a process.
    """
    for name in ignored:
        if name in request.model_fields_set and getattr(request, name) is not None:
            _say_once(name, f"set {name}, which has no effect: the run samples")
    if tool_choice not in (None, "auto", "none"):
        _say_once("tool_choice", "required a tool call; the policy decides whether it calls")

    ask = ask._replace(messages=[*map(session.without_false_marks, ask.messages)])

    async def turn() -> Reply:
        reply = await session.ask(ask)
        if reply.turn is None:
            raise invalid(reply.error, "messages", reply.code or None)
        return reply

    return await asyncio.gather(*(turn() for _ in range(count)))


def _say_once(field: str, text: str):
    if field not in _said:
        _said.add(field)
        print(f"environment: an agent {text}", file=sys.stderr)


def token_fields(session: Session, reply: Reply) -> dict[str, Any]:
    """The tokens of a turn as NeMo Gym names them, for drivers outside of the run; nothing for its own agents."""
    shown = dict(prompt_token_ids=reply.prompt, generation_token_ids=reply.tokens, generation_log_probs=reply.logprobs)
    return {name: list(values) for name, values in shown.items()} if session.shows_tokens else {}


def streamed(events: Iterable[dict[str, Any]], end: bytes = b"") -> Response:
    """All events as a stream, each named by its `type` if it has one."""
    lines = [event(each, each.get("type")) for each in events]
    return Response(b"".join([*lines, end]), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


def error_response(error: RequestError, path: str) -> JSONResponse:
    """An error as the clients of the path understand it."""
    if path != ANTHROPIC:
        return error.response
    found = error.content["error"]
    content = {"type": "error", "error": {"type": found["type"], "message": found["message"]}}
    return JSONResponse(content, error.status, error.headers)
