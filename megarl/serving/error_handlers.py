"""What a FastAPI application answers to errors: OpenAI's object (`errors.py`)."""

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from megarl.serving.errors import RequestError, internal, unknown_path, validation_error, wrong_method


def add_error_handlers(api: FastAPI):
    """Has the application answer all errors as OpenAI does."""

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
            return unknown_path(path, filter(None, map(_shown_path, api.routes))).response
        if error.status_code == 405:
            return wrong_method(request.method, path, (error.headers or {}).get("Allow", "another method")).response
        return RequestError(error.status_code, str(error.detail), headers=dict(error.headers or {})).response

    @api.exception_handler(Exception)
    async def fault(_, __: Exception):
        return internal().response


def _shown_path(route: Any) -> str | None:
    """The path of a route that clients may know of."""
    is_shown = getattr(route, "include_in_schema", False) and not route.path.startswith("/admin")
    return route.path if is_shown else None
