"""Every error answer of the server is OpenAI's object: {"error": {"message", "type", "param", "code"}}."""

from collections.abc import Sequence
from typing import Any

from starlette.responses import JSONResponse

TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable",
}

_MAX_MESSAGE_LENGTH = 400  # characters
_MAX_ECHO_LENGTH = 100  # characters of what a client sent


class RequestError(Exception):
    """An error answer to one request.

    Args:
        status: of HTTP.
        message: for the client, without secrets.
        param: the request's field that is wrong.
        code: a word for programs.
        kind: OpenAI's `type`; by default that of the status.
        headers: further headers of the answer.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None, kind: str | None = None,
        headers: dict[str, str] | None = None,
    ):  # fmt: skip
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
    """The error of a fault of the server's own, status 500; says nothing of its cause."""
    return RequestError(500, "internal error", code="internal_error")


def echo(value: Any) -> str:
    """What a client sent, for a message: its `repr`, cut at 100 characters."""
    if isinstance(value, str | bytes | list):
        value = value[: _MAX_ECHO_LENGTH + 1]
    if isinstance(value, int) and value.bit_length() > 4 * _MAX_ECHO_LENGTH:
        return "a very large number"
    text = repr(value)
    return text if len(text) <= _MAX_ECHO_LENGTH else f"{text[:_MAX_ECHO_LENGTH]}…"


def validation_error(errors: Sequence[Any]) -> RequestError:
    """The error of a request that does not match its schema: names the first wrong field, says what is allowed.

    `errors` are those of pydantic or FastAPI.
    """
    first = errors[0]
    location = [str(part) for part in first["loc"] if part not in ("body", "query")]
    if first["type"] == "json_invalid":
        return invalid("the body is no JSON", code="invalid_json")
    if first["type"] == "extra_forbidden":
        name = _clean(".".join(part for part in location if "[" not in part), _MAX_ECHO_LENGTH)
        return invalid(f"{name}: unknown field; it is not supported", name, "unknown_field")
    if not location:
        return invalid("the body must be a JSON object, with Content-Type: application/json")
    field, name = location[0], _name(first)
    # Each type that a field may have reports errors of its own.
    same = [error for error in errors if _name(error) == name]
    messages = list(dict.fromkeys(_message(error) for error in same))[:3]
    given = "" if first["type"] == "missing" else f" (got {echo(first.get('input'))})"
    return invalid(f"{name}: {'; or: '.join(messages)}{given}", field, "invalid_value")


def _name(error: Any) -> str:
    """The field that is wrong; of a message with its number, from 0, and its own field: `messages.1.content`."""
    location = [part for part in error["loc"] if part not in ("body", "query")]
    if location[:1] != ["messages"]:
        return str(location[0]) if location else ""
    # After the number is the kind of the message, after that its field.
    return ".".join(map(str, [*location[:2], *location[3:4]]))


def _message(error: Any) -> str:
    if error["type"] == "missing":
        return f"{'.'.join(str(part) for part in error['loc'][1:])} is missing"
    return error["msg"].removeprefix("Value error, ")


def _clean(text: str, max_length: int) -> str:
    """Text that is valid UTF-8, without line breaks, of bounded length."""
    text = " ".join(text[: max_length + 1].encode("utf-8", "replace").decode().split())
    return text if len(text) <= max_length else f"{text[:max_length]}…"
