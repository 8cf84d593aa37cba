"""The HTTP interface of sessions: a driver takes one, asks the policy in it, and ends it with a reward."""

import dataclasses
import hmac
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import FastAPI, Request, Response
from pydantic import Field

from megarl.environments.agents.endpoint import application, error_response, given_key
from megarl.environments.protocol import Observation
from megarl.environments.sessions.registry import OpenSession, Registry
from megarl.errors import one_line
from megarl.measurements import MAX_PARTS, MAX_VALUE, parts_of
from megarl.observe.files import json_bytes
from megarl.serving.errors import RequestError, add_error_handlers, invalid
from megarl.serving.middleware import BodyAndDisconnect, checked, one_length, same_origin
from megarl.serving.schemas import StrictModel

_ROOT = "/sessions"


class ClaimRequest(StrictModel):
    """A request for /sessions: it has no fields."""


class FinishRequest(StrictModel):
    """The end of a session: its score, or why the driver has failed."""

    reward: Annotated[float, Field(ge=-MAX_VALUE, le=MAX_VALUE)] | None = None
    correct: bool | None = None
    parts: dict[str, float] | None = None  # under the rule of `measurements`
    failure: Annotated[str, Field(min_length=1, max_length=500)] | None = None


def build_app(registry: Registry, api_keys: Sequence[str], host: str, max_bytes: int, seconds: float) -> Any:
    """The ASGI application.

    Args:
        api_keys: with which drivers take sessions; none: any client of this machine may.
        host: that the server listens on.
        max_bytes, seconds: of a request's body.
    """
    api = FastAPI(title="megarl sessions", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    add_error_handlers(api)

    @api.get("/health")
    async def health():
        return {"status": "ok"}

    @api.post(_ROOT)
    async def claim(body: ClaimRequest | None = None):
        found = registry.claim()
        task = dataclasses.asdict(found.offer.task)
        given = {"id": found.name, "key": found.session.key, "path": f"{_ROOT}/{found.name}/v1", "task": task}
        given |= found.facts
        return Response(json_bytes(given), media_type="application/json")  # metadata may be what JSON lacks

    @api.post(_ROOT + "/{name}/finish")
    async def finish(body: FinishRequest, request: Request):
        found: OpenSession = request.scope["open_session"]
        registry.get(found.name)  # another request may have ended it meanwhile
        if (body.reward is None) == (body.failure is None):
            raise invalid("an end has either a reward or a failure", "reward")
        if body.reward is None:
            registry.finish(found, None, f"its driver says: {one_line(body.failure)}")
        else:
            score = Observation([], float(body.reward), True, body.correct, _parts(body.parts or {}, registry))
            registry.finish(found, score)
        return {"id": found.name, "status": "ended"}

    own = checked(BodyAndDisconnect(api, max_bytes, seconds), one_length)
    app = _Sessions(registry, own, application(max_bytes, seconds), list(map(str.encode, api_keys)))
    return app if api_keys else checked(app, same_origin(host))


def _parts(given: dict[str, float], registry: Registry) -> dict[str, float]:
    """The parts of a score. RequestError 400 for one that may not be a metric, or is one too many for the run."""
    try:
        parts = parts_of(given)
    except ValueError as error:
        raise invalid(str(error), "parts") from None
    if beyond := registry.part_names.beyond(parts):
        raise invalid(f"the run has {MAX_PARTS} names of parts already; one more is {beyond[0]!r}", "parts")
    registry.part_names.add(parts)
    return parts


class _Sessions:
    """Checks keys, and leads the paths of a session to the endpoint of agents."""

    def __init__(self, registry: Registry, own: Any, policy: Any, api_keys: list[bytes]):
        """`own`: answers the paths of sessions; `policy`: those of a session's policy."""
        self._registry, self._own, self._policy, self._keys = registry, own, policy, api_keys

    async def __call__(self, scope, receive, send):
        """The ASGI application."""
        if scope["type"] != "http":
            return None
        try:
            app, scope = self._led(scope)
        except RequestError as error:
            return await error_response(error, scope["path"])(scope, receive, send)
        return await app(scope, receive, send)

    def _led(self, scope: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """(application, its scope). RequestError for a wrong key, or a session that is not there."""
        head, _, rest = scope["path"].removeprefix(_ROOT + "/").partition("/")
        if not scope["path"].startswith(_ROOT + "/") or not rest:
            if scope["path"] == _ROOT and self._keys:
                _check_key(scope, self._keys, "a valid API key is needed: Authorization: Bearer KEY")
            return self._own, scope
        found = self._registry.get(head)
        _check_key(scope, [found.session.key.encode()], "the key is not that of this session")
        if rest.startswith("v1/"):
            path = f"/{rest}"
            return self._policy, {**scope, "path": path, "raw_path": path.encode(), "session": found.session}
        return self._own, {**scope, "open_session": found}


def _check_key(scope: dict[str, Any], keys: list[bytes], problem: str):
    given, is_right = given_key(scope["headers"]), False
    for key in keys:
        is_right |= hmac.compare_digest(given, key)
    if not is_right:
        raise RequestError(401, problem, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
