"""What the dialects of an agent's endpoint share: turns of the policy, tokens, streams and errors."""

import asyncio
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import BaseModel
from starlette.responses import Response

from megarl.environments.agents.session import Session
from megarl.environments.calls import Ask, Reply
from megarl.serving.answers import event
from megarl.serving.error_answers import JSONResponse, RequestError, invalid

ANTHROPIC = "/v1/messages"

_said: set[str] = set()  # fields without effect that this process has named


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
