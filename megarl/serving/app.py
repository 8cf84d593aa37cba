"""The application: all routes, and the layers around them."""

from pathlib import Path
from typing import Any, Literal

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, JSONResponse, Response

from megarl.serving import admin, metrics, responses, schemas, tokenization
from megarl.serving.chat import chat
from megarl.serving.completions import complete
from megarl.serving.context import ServingContext
from megarl.serving.errors import RequestError, internal, validation_error
from megarl.serving.generate import generate
from megarl.serving.middleware import BodyAndDisconnect, KeyCheck, Observed

PAGE = Path(__file__).with_name("page.html")
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"

_STATUSES = {
    400: "the request is wrong",
    401: "the key is missing or wrong",
    404: "no such path or model",
    405: "no such method",
    413: "the body is too large",
    415: "the body is no JSON",
    429: "the queue is full",
    500: "a fault of the server",
    503: "the server cannot answer now, or took too long",
}
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": responses.ErrorResponse, "description": text} for status, text in _STATUSES.items()
}
_EVENT = {
    "type": "object",
    "properties": {"data": {"type": "string", "description": "a JSON object, at last [DONE]"}},
    "required": ["data"],
}
_STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {"schema": _EVENT}}}}
_TOKENS = "$response.body#/tokens"
_TOKENIZED: dict[int | str, dict[str, Any]] = {
    200: {
        "links": {
            "Detokenize": {"operationId": "detokenize", "requestBody": {"tokens": _TOKENS}},
            "Generate": {"operationId": "generate", "requestBody": {"input_ids": _TOKENS}},
        }
    }
}


def build_app(context: ServingContext):
    """The ASGI application of the server."""
    config = context.config
    api = FastAPI(title="megarl", docs_url=None, redoc_url=None, redirect_slashes=False, responses=_ERRORS)
    _add_error_handlers(api)
    _add_generation(api, context)
    _add_information(api, context)
    if config.admin_keys:
        _add_admin(api, context)
    _correct_schema(api)
    paths = [route.path for route in api.routes if hasattr(route, "path")]
    guarded = BodyAndDisconnect(api, config.max_body_bytes, config.request_timeout)
    return Observed(KeyCheck(guarded, config.api_keys, config.admin_keys), context.metrics, paths)


def _add_error_handlers(api: FastAPI):
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


def _add_generation(api: FastAPI, context: ServingContext):
    @api.post("/v1/completions", response_model=responses.CompletionResponse, responses=_STREAMED)
    async def v1_completions(request: schemas.CompletionRequest):
        return await complete(context, request)

    @api.post("/v1/chat/completions", response_model=responses.ChatCompletionResponse, responses=_STREAMED)
    async def v1_chat_completions(request: schemas.ChatCompletionRequest):
        return await chat(context, request)

    @api.post(
        "/generate",
        operation_id="generate",
        response_model=responses.GenerateResult | list[responses.GenerateResult],
        responses=_STREAMED,
    )
    async def generate_tokens(request: schemas.GenerateRequest):
        return await generate(context, request)

    @api.post("/tokenize", response_model=responses.TokenizeResponse, responses=_TOKENIZED)
    async def tokenize(request: schemas.TokenizeRequest):
        return JSONResponse(await tokenization.tokenize(context, request))

    @api.post("/detokenize", response_model=responses.DetokenizeResponse, operation_id="detokenize")
    async def detokenize(request: schemas.DetokenizeRequest):
        return JSONResponse(await tokenization.detokenize(context, request))


def _add_information(api: FastAPI, context: ServingContext):
    @api.get("/health", response_model=responses.StatusResponse)
    async def health():
        return JSONResponse({"status": "alive"})

    @api.get("/ready", response_model=responses.StatusResponse)
    async def ready():
        context.dispatcher.check_accepting()
        return JSONResponse({"status": "ready", **admin.weights_in_use(context)})

    @api.get("/v1/models", response_model=responses.ModelList)
    async def models():
        label = admin.weights_in_use(context).get("label", "")
        card = {"id": context.config.model_name, "object": "model", "created": context.created, "owned_by": "megarl"}
        card |= {"root": label, "max_model_len": context.max_length}
        return JSONResponse({"object": "list", "data": [card]})

    @api.get("/tokenizer_info", response_model=responses.TokenizerInfo)
    async def tokenizer_info():
        return JSONResponse(tokenization.tokenizer_info(context))

    @api.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def prometheus():
        return Response(context.metrics.text(), headers={"Content-Type": metrics.CONTENT_TYPE})

    @api.get("/", response_class=Response, responses={200: {"content": {"text/html": {}}}})
    async def page():
        if not PAGE.is_file():
            raise RequestError(404, "this server has no page")
        headers = {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff", "Cache-Control": "no-cache"}
        return FileResponse(PAGE, media_type="text/html", headers=headers)


def _add_admin(api: FastAPI, context: ServingContext):
    @api.post("/admin/pause", response_model=responses.StatusResponse)
    async def pause(mode: Literal["wait", "abort", "keep"] = "wait"):
        return JSONResponse(await admin.control(context, "pause", mode=mode))

    @api.post("/admin/resume", response_model=responses.StatusResponse)
    async def resume():
        return JSONResponse(await admin.control(context, "resume"))

    @api.post("/admin/weights", response_model=responses.StatusResponse)
    async def weights(request: schemas.WeightsRequest):
        path = admin.weights_path(context, request.path)
        return JSONResponse(await admin.control(context, "weights", path=path))


def _correct_schema(api: FastAPI):
    """Takes FastAPI's own validation answer, 422, out of /openapi.json: this server never gives it."""
    original = api.openapi

    def openapi() -> dict[str, Any]:
        schema = original()
        for path in schema["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            schema["components"]["schemas"].pop(name, None)
        return schema

    api.openapi = openapi
