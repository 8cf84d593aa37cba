"""The HTTP endpoint of an agent's episode: a port of the loopback interface of its own, with a key.

Each episode has its own limit of connections, so an agent that opens too many shuts out nobody but itself.
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import cache, partial
from typing import Any, TypeVar

import uvicorn
from pydantic import BaseModel, ValidationError
from starlette.responses import Response
from uvicorn.server import ServerState

from megarl.environments.agents.anthropic_messages import MessagesRequest, complete_messages
from megarl.environments.agents.dialect import ANTHROPIC, error_response, without_images
from megarl.environments.agents.openai_chat import AgentChatRequest, complete_chat
from megarl.environments.agents.openai_responses import ResponsesRequest, complete_response
from megarl.environments.agents.session import Session
from megarl.serving.error_answers import (
    JSONResponse,
    RequestError,
    internal,
    invalid,
    unknown_path,
    validation_error,
    wrong_method,
)
from megarl.serving.listening import SERVER, LimitedProtocol
from megarl.serving.middleware import check_body, check_key, checked, one_length, with_body

MAX_CONNECTIONS = 64
MAX_BODY_BYTES = 16 << 20
_HEAD_SECONDS = 30.0  # until the head of a request is there
_MODEL = "policy"
_MODELS = "/v1/models"
_COMPLETIONS: dict[str, tuple[type[BaseModel], Any]] = {  # path: (schema of the body, what answers it)
    "/v1/chat/completions": (AgentChatRequest, complete_chat),
    "/v1/responses": (ResponsesRequest, complete_response),
    ANTHROPIC: (MessagesRequest, complete_messages),
}
Headers = Sequence[tuple[bytes, bytes]]  # with names in lower case
_Request = TypeVar("_Request", bound=BaseModel)

log = logging.getLogger(__name__)


@asynccontextmanager
async def endpoint(session: Session) -> AsyncIterator[None]:
    """The endpoint of a session, which gets its `url`; it ends with all of its connections."""

    def check(scope: dict[str, Any]):
        _check_key(scope["headers"], session)
        scope["session"] = session

    config = uvicorn.Config(checked(application(), check, error_response), **SERVER)
    config.load()
    state, limited = ServerState(), partial(LimitedProtocol, MAX_CONNECTIONS, _HEAD_SECONDS)
    protocol: Any = partial(limited, config=config, server_state=state, app_state={})
    server = await asyncio.get_running_loop().create_server(protocol, "127.0.0.1", 0)
    session.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    try:
        yield
    finally:
        server.close()
        for connection in list(state.connections):
            with suppress(AttributeError):
                connection.transport.abort()
        for task in list(state.tasks):
            task.cancel()


def _check_key(headers: Headers, session: Session):
    check_key(given_key(headers), [session.key.encode()], "the key is not that of this episode")


def given_key(headers: Headers) -> bytes:
    """The key of a request: as OpenAI's clients send it, or Anthropic's; nothing without one."""
    found = dict(headers)
    return found.get(b"x-api-key") or found.get(b"authorization", b"").removeprefix(b"Bearer ")


@cache
def application(max_bytes: int = MAX_BODY_BYTES, seconds: float = _HEAD_SECONDS):
    """The ASGI application; the request's scope has the session. `max_bytes`, `seconds`: of a request's body."""

    async def app(scope, receive, send):
        body = (await receive())["body"]  # all of it
        answer = await _answer(scope["session"], scope["method"], scope["path"], body)
        await answer(scope, receive, send)

    return checked(with_body(app, max_bytes, seconds), one_length)


async def answer_whole(session: Session, method: str, path: str, headers: Headers, body: bytes) -> Response:
    """The answer to a request that comes without a connection; `headers`: with names in lower case."""
    try:
        _check_key(headers, session)
        check_body(body, headers, MAX_BODY_BYTES)
    except RequestError as error:
        return error_response(error, path)
    return await _answer(session, method, path, body)


async def _answer(session: Session, method: str, path: str, body: bytes) -> Response:
    schema, complete = _COMPLETIONS.get(path, (None, None))
    try:
        if schema is None and path != _MODELS and not path.startswith(f"{_MODELS}/"):
            raise unknown_path(path, [*_COMPLETIONS, _MODELS])
        if method != (allowed := "GET" if schema is None else "POST"):
            raise wrong_method(method, path, allowed)
        if schema is not None:
            return await complete(session, _parsed(schema, await without_images(session, _json(body))))
        if path == _MODELS:
            return JSONResponse({"object": "list", "data": [_card(_MODEL)]})
        return JSONResponse(_card(path.removeprefix(f"{_MODELS}/")))
    except RequestError as error:
        return error_response(error, path)
    except Exception:
        log.exception("an agent's request at %r", path)
        return error_response(internal(), path)


def _card(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "megarl"}


def _json(body: bytes) -> Any:
    """RequestError 400 for a body that is none."""
    try:
        return json.loads(body) if body else None
    except (ValueError, RecursionError):
        raise invalid("the body is no JSON", code="invalid_json") from None


def _parsed(schema: type[_Request], given: Any) -> _Request:
    """RequestError 400 if the request does not match the schema."""
    try:
        return schema.model_validate(given)
    except ValidationError as error:
        raise validation_error(error.errors(include_url=False), given) from None
    except (ValueError, RecursionError):
        raise invalid("the body is no JSON", code="invalid_json") from None
