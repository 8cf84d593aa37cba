"""Every error answer of the server is OpenAI's object: {"error": {"message", "type", "param", "code"}}."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from starlette import responses
from starlette.requests import Request

TYPES = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}
TYPES |= {500: "server_error", 503: "service_unavailable"}

_MAX_MESSAGE_LENGTH = 400  # characters
_MAX_ECHO_LENGTH = 100  # characters of what a client sent


class JSONResponse(responses.JSONResponse):
    """Starlette's, which raises for a lone surrogate, as chat templates may hold one; it becomes its escape in JSON."""

    def render(self, content: Any) -> bytes:
        """The body."""
        written = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return written.encode(errors="backslashreplace")


class RequestError(Exception):
    """An error answer with this status of HTTP. `message`: without secrets; `param`: the request's field that is wrong;
    `code`: a word for programs; `kind`: OpenAI's `type`.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        kind: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.kind = kind or TYPES.get(status, "invalid_request_error")
        self.headers = headers or {}

    @property
    def content(self) -> dict[str, Any]:
        message, param = _clean(str(self), _MAX_MESSAGE_LENGTH), self.param and _clean(self.param, _MAX_ECHO_LENGTH)
        return {"error": {"message": message, "type": self.kind, "param": param, "code": self.code}}

    @property
    def response(self) -> JSONResponse:
        return JSONResponse(self.content, self.status, self.headers)


def invalid(message: str, param: str | None = None, code: str | None = None) -> RequestError:
    """The error of a request that can never succeed, status 400."""
    return RequestError(400, message, param, code)


def unavailable(message: str) -> RequestError:
    """The error of a server that cannot take a request now, status 503; the client may retry after a second."""
    return RequestError(503, message, headers={"Retry-After": "1"})


def timed_out(seconds: float) -> RequestError:
    """The error of a request that took longer than `seconds`, status 503; OpenAI's clients do not retry it."""
    message = f"the request was not finished after {seconds:g} seconds"
    return RequestError(503, message, code="timeout", kind="timeout", headers={"x-should-retry": "false"})


def internal() -> RequestError:
    """Says nothing of the cause."""
    return RequestError(500, "internal error", code="internal_error")


def unknown_path(path: str, known: Iterable[str]) -> RequestError:
    """The error of a path that does not exist, status 404; says which do, below /v1 those of OpenAI's API."""
    listed = list(dict.fromkeys(known))
    if path == "/v1" or path.startswith("/v1/"):
        listed = [each for each in listed if each.startswith("/v1/")] or listed
        return RequestError(404, f"{echo(path)} is not built; of OpenAI's API there are {', '.join(listed)}")
    return RequestError(404, f"{echo(path)}: no such path; there are {', '.join(listed)}")


def wrong_method(method: str, path: str, allowed: str) -> RequestError:
    """The error of a method that a path does not have, status 405."""
    return RequestError(405, f"{echo(method)} {echo(path)}: allowed is {allowed}", headers={"Allow": allowed})


def echo(value: Any) -> str:
    """What a client sent, for a message: its `repr`, cut at 100 characters."""
    if isinstance(value, str | bytes | list):
        value = value[: _MAX_ECHO_LENGTH + 1]
    if isinstance(value, int) and value.bit_length() > 4 * _MAX_ECHO_LENGTH:
        return "a very large number"
    text = repr(value)
    return text if len(text) <= _MAX_ECHO_LENGTH else f"{text[:_MAX_ECHO_LENGTH]}…"


def validation_error(errors: Sequence[Any], body: Any = None) -> RequestError:
    """The error of a request that does not match its schema: names the first wrong field, says what is allowed.

    `errors` are those of pydantic or FastAPI; `body`: the request as JSON values.
    """
    first = errors[0]
    if first["type"] == "json_invalid":
        return invalid("the body is no JSON", code="invalid_json")
    if not _location(first):
        return invalid("the body must be a JSON object, with Content-Type: application/json")
    field, begin = str(_location(first)[0]), _path(first, body)[:2]
    # Each type that a field may have reports errors of its own; the innermost ones are of the type that fits best.
    paths = [(_path(error, body), error) for error in errors]
    path = max((path for path, _ in paths if path[: len(begin)] == begin), key=len)
    same = [error for each, error in paths if each == path]
    name = ".".join(map(str, path))
    if same[0]["type"] == "extra_forbidden":
        name = _clean(name, _MAX_ECHO_LENGTH)
        return invalid(f"{name}: unknown field; it is not supported", name, "unknown_field")
    said = ["it is missing" if e["type"] == "missing" else e["msg"].removeprefix("Value error, ") for e in same]
    given = "" if same[0]["type"] == "missing" else f" (got {echo(same[0].get('input'))})"
    return invalid(f"{name}: {'; or: '.join(list(dict.fromkeys(said))[:3])}{given}", field, "invalid_value")


def add_error_handlers(api: Any):
    """Has a FastAPI application answer all errors as OpenAI does."""
    from fastapi.exceptions import RequestValidationError  # not for agents' endpoints, which need no FastAPI
    from starlette.exceptions import HTTPException

    @api.exception_handler(RequestError)
    async def request_error(_, error: RequestError):
        return error.response

    @api.exception_handler(RequestValidationError)
    async def wrong_request(_, error: RequestValidationError):
        return validation_error(error.errors(), error.body).response

    @api.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException):
        path = request.url.path
        if error.status_code == 404:
            shown = (each.path for each in api.routes if getattr(each, "include_in_schema", False))
            return unknown_path(path, (each for each in shown if not each.startswith("/admin"))).response
        if error.status_code == 405:
            return wrong_method(request.method, path, (error.headers or {}).get("Allow", "another method")).response
        return RequestError(error.status_code, str(error.detail), headers=dict(error.headers or {})).response

    @api.exception_handler(Exception)
    async def fault(_, __: Exception):
        return internal().response


def _location(error: Any) -> Sequence[str | int]:
    return error["loc"][1:] if error["loc"][:1] in (("body",), ("query",)) else error["loc"]


def _path(error: Any, body: Any) -> tuple[str | int, ...]:
    """Where an error is: `messages.1.content`. Its own location also has names of types, which no client knows."""
    location = _location(error)
    found: list[str | int] = []
    value, tagged = body, None
    for number, part in enumerate(location, start=1):
        if value is not tagged and number < len(location) and _is_tag(value, part):
            tagged = value
        elif isinstance(value, dict) and part in value:
            value = value[part]
            found.append(part)
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            value = value[part]
            found += [part] if isinstance(value, dict) else []
    if error["type"] == "missing":
        found.append(location[-1])
    return tuple(found) or (location[0],)


def _is_tag(value: Any, part: str | int) -> bool:
    """Whether a part of a location is the kind of an object, such as `text`, and not its field of that name."""
    return isinstance(value, dict) and part == value.get("type") and not isinstance(value.get(part), dict | list)


def _clean(text: str, max_length: int) -> str:
    """Text that is valid UTF-8, without line breaks, of bounded length."""
    text = " ".join(text[: max_length + 1].encode("utf-8", "replace").decode().split())
    return text if len(text) <= max_length else f"{text[:max_length]}…"
