"""What the dialects of an agent's endpoint share: answers, errors of budgets, and fields without effect."""

import sys
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import BaseModel
from starlette.responses import Response

from megarl.environments.agents.session import Session
from megarl.environments.calls import Ask, Reply
from megarl.serving.answers import event
from megarl.serving.errors import JSONResponse, invalid

_FORCED = "tool_choice"
_named: set[str] = set()  # fields without effect that this process has named


def name_ignored(request: BaseModel, names: Iterable[str]):
    """Says once of each of these fields that a client has set that it has no effect."""
    for name in names:
        if name in request.model_fields_set and getattr(request, name) is not None and name not in _named:
            _named.add(name)
            print(f"environment: an agent set {name}, which has no effect: the run samples", file=sys.stderr)


def name_forced_call(choice: Any):
    """Says once that a choice which requires a call has no effect."""
    if choice not in (None, "auto", "none") and _FORCED not in _named:
        _named.add(_FORCED)
        print("environment: an agent required a tool call; the policy decides whether it calls", file=sys.stderr)


async def written(session: Session, ask: Ask) -> Reply:
    """The policy's next turn. RequestError 400 for a request that the run's budgets, or the chat template, refuse."""
    reply = await session.ask(ask)
    if reply.turn is None:
        raise invalid(reply.error, "messages", reply.code or None)
    return reply


def token_fields(session: Session, reply: Reply) -> dict[str, Any]:
    """The tokens of a turn as NeMo Gym names them, for drivers outside of the run; nothing for its own agents."""
    if not session.shows_tokens:
        return {}
    return {
        "prompt_token_ids": list(reply.prompt),
        "generation_token_ids": list(reply.tokens),
        "generation_log_probs": list(reply.logprobs),
    }


def respond(events: Sequence[Any], streams: bool = False, ends: bytes = b"data: [DONE]\n\n") -> Response:
    """The only object as JSON; or all events as a stream: objects, or (name, object)."""
    if not streams:
        return JSONResponse(events[0])
    named = [each if isinstance(each, tuple) else (None, each) for each in events]
    lines = [event(content, name) for name, content in named]
    return Response(b"".join([*lines, ends]), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
