"""What a FastAPI application answers to errors: OpenAI's object (`errors.py`)."""

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from megarl.serving.errors import RequestError, internal, validation_error


def add_error_handlers(api: FastAPI):
    """Has the application answer all errors as OpenAI does."""

    @api.exception_handler(RequestError)
    async def request_error(_, error: RequestError):
        return error.response

    @api.exception_handler(RequestValidationError)
    async def wrong_request(_, error: RequestValidationError):
        return validation_error(error.errors()).response

    @api.exception_handler(HTTPException)
    async def http_error(_, error: HTTPException):
        return RequestError(error.status_code, str(error.detail), headers=dict(error.headers or {})).response

    @api.exception_handler(Exception)
    async def fault(_, __: Exception):
        return internal().response
