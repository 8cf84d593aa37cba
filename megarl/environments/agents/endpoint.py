"""The HTTP endpoint of an agent's episode: a port of the loopback interface of its own, with a key.

Each episode has its own limit of connections, so an agent that opens too many shuts out nobody but itself.
"""

import asyncio
import contextlib
import hmac
from functools import cache, partial
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from uvicorn.server import ServerState

from megarl.environments.agents.agent import Address
from megarl.environments.agents.anthropic_messages import MessagesRequest, complete_messages
from megarl.environments.agents.chat import AgentChatRequest, complete_chat
from megarl.environments.agents.openai_responses import ResponsesRequest, complete_response
from megarl.environments.agents.session import Session
from megarl.serving.connections import LimitedProtocol
from megarl.serving.errors import RequestError, internal, validation_error
from megarl.serving.middleware import BodyAndDisconnect, OneLength

MAX_CONNECTIONS = 64
MAX_BODY_BYTES = 16 << 20
_HEAD_SECONDS = 30.0  # until the head of a request is there
_ANTHROPIC = "/v1/messages"
_MODEL = "policy"


class Endpoint:
    """An open endpoint."""

    def __init__(self, server: asyncio.Server, state: ServerState, session: Session):
        self._server, self._state = server, state
        port = server.sockets[0].getsockname()[1]
        self.address = Address(f"http://127.0.0.1:{port}/v1", session.key)

    @classmethod
    async def open(cls, session: Session) -> "Endpoint":
        """Opens the endpoint of a session."""
        app = _KeyCheck(application(), session)
        config = uvicorn.Config(
            app, ws="none", loop="asyncio", lifespan="off", access_log=False, log_config=None, server_header=False,
            proxy_headers=False,
        )  # fmt: skip
        config.load()
        state = ServerState()
        protocol: Any = partial(
            LimitedProtocol, MAX_CONNECTIONS, _HEAD_SECONDS, config=config, server_state=state, app_state={}
        )
        server = await asyncio.get_running_loop().create_server(protocol, "127.0.0.1", 0)
        return cls(server, state, session)

    def close(self):
        """Ends it with all of its connections."""
        self._server.close()
        for connection in list(self._state.connections):
            with contextlib.suppress(AttributeError):
                connection.transport.abort()
        for task in list(self._state.tasks):
            task.cancel()


class _KeyCheck:
    """Lets requests with the session's key pass: as OpenAI's clients send it, or Anthropic's."""

    def __init__(self, app, session: Session):
        self._app, self._session = app, session

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return None
        if not hmac.compare_digest(given_key(scope), self._session.key.encode()):
            error = RequestError(401, "the key is not that of this episode", code="invalid_api_key")
            return await error_response(error, scope["path"])(scope, receive, send)
        with contextlib.suppress(asyncio.CancelledError):  # the endpoint was closed: nobody waits for the answer
            await self._app({**scope, "session": self._session}, receive, send)
        return None


def given_key(scope: dict[str, Any]) -> bytes:
    """The key of a request: as OpenAI's clients send it, or Anthropic's; nothing without one."""
    headers = dict(scope["headers"])
    return headers.get(b"x-api-key") or headers.get(b"authorization", b"").removeprefix(b"Bearer ")


@cache
def application(max_bytes: int = MAX_BODY_BYTES, seconds: float = _HEAD_SECONDS):
    """The routes; the request's scope has the session. `max_bytes`, `seconds`: of a request's body."""
    api = FastAPI(title="megarl agent", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    add_error_handlers(api)

    @api.post("/v1/chat/completions")
    async def chat(body: AgentChatRequest, request: Request):
        return await complete_chat(request.scope["session"], body)

    @api.post("/v1/responses")
    async def responses(body: ResponsesRequest, request: Request):
        return await complete_response(request.scope["session"], body)

    @api.post(_ANTHROPIC)
    async def messages(body: MessagesRequest, request: Request):
        return await complete_messages(request.scope["session"], body)

    @api.get("/v1/models")
    async def models():
        return {"object": "list", "data": [_card(_MODEL)]}

    @api.get("/v1/models/{name:path}")
    async def model(name: str):
        return _card(name)

    return OneLength(BodyAndDisconnect(api, max_bytes, seconds))


def _card(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "megarl"}


def add_error_handlers(api: FastAPI):
    """Answers errors as OpenAI does, and as Anthropic does where its clients ask."""

    @api.exception_handler(RequestError)
    async def request_error(request: Request, error: RequestError):
        return error_response(error, request.url.path)

    @api.exception_handler(RequestValidationError)
    async def wrong_request(request: Request, error: RequestValidationError):
        return error_response(validation_error(error.errors()), request.url.path)

    @api.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException):
        return error_response(RequestError(error.status_code, str(error.detail)), request.url.path)

    @api.exception_handler(Exception)
    async def fault(request: Request, _: Exception):
        return error_response(internal(), request.url.path)


def error_response(error: RequestError, path: str) -> JSONResponse:
    """An error as the clients of the path understand it."""
    if path != _ANTHROPIC:
        return error.response
    found = error.content["error"]
    content = {"type": "error", "error": {"type": found["type"], "message": found["message"]}}
    return JSONResponse(content, error.status, error.headers)
