"""The application: all routes, and the layers around them."""

from pathlib import Path
from typing import Any, Literal

import prometheus_client
from fastapi import FastAPI
from starlette.responses import FileResponse, Response

from megarl.serving import responses, schemas
from megarl.serving.completions import GenerateAnswer, chat, complete
from megarl.serving.context import ServingContext
from megarl.serving.error_answers import JSONResponse, RequestError, add_error_handlers, invalid
from megarl.serving.middleware import checked, has_key, observed, one_length, same_origin, with_body

PAGE = Path(__file__).with_name("page.html")
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"

_STATUSES: dict[int | str, str] = {
    400: "the request is wrong",
    401: "the key is missing or wrong",
    404: "no such path or model",
    405: "no such method",
    413: "the body is too large",
    415: "the body is no JSON",
    429: "the queue is full",
    500: "a fault of the server",
    503: "the server cannot answer now, or took too long",
    "4XX": "the request is wrong",  # with it, FastAPI does not declare its own answer 422
}
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": responses.ErrorResponse, "description": text} for status, text in _STATUSES.items()
}
_DATA = {"data": {"type": "string", "description": "a JSON object, at last [DONE]"}}
_EVENT = {"type": "object", "properties": _DATA, "required": ["data"]}
_STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {"schema": _EVENT}}}}
_TOKENS = "$response.body#/tokens"
_LINKS = {
    "Detokenize": {"operationId": "detokenize", "requestBody": {"tokens": _TOKENS}},
    "Generate": {"operationId": "generate", "requestBody": {"input_ids": _TOKENS}},
}
_TOKENIZED: dict[int | str, dict[str, Any]] = {200: {"links": _LINKS}}


def build_app(context: ServingContext):
    """The ASGI application of the server."""
    config = context.config
    api = FastAPI(title="megarl", docs_url=None, redoc_url=None, redirect_slashes=False, responses=_ERRORS)
    add_error_handlers(api)
    _add_generation(api, context)
    _add_information(api, context)
    if config.admin_keys:
        _add_admin(api, context)
    paths = [route.path for route in api.routes if hasattr(route, "path")]
    settings = config.settings
    seconds = min(settings.connection_timeout, settings.request_timeout)
    guarded = with_body(api, int(settings.max_body_mb * 2**20), seconds)
    app = checked(guarded, has_key(config.api_keys, config.admin_keys))
    if not config.api_keys:
        app = checked(app, same_origin(settings.host))
    return observed(checked(app, one_length), context.metrics, paths)


def _add_generation(api: FastAPI, context: ServingContext):
    @api.post("/v1/completions", response_model=responses.CompletionResponse, responses=_STREAMED)
    async def v1_completions(request: schemas.CompletionRequest):
        return await complete(context, request)

    @api.post("/v1/chat/completions", response_model=responses.ChatCompletionResponse, responses=_STREAMED)
    async def v1_chat_completions(request: schemas.ChatCompletionRequest):
        return await chat(context, request)

    generated = responses.GenerateResult | list[responses.GenerateResult]

    @api.post("/generate", operation_id="generate", response_model=generated, responses=_STREAMED)
    async def generate_tokens(request: schemas.GenerateRequest):
        return await context.respond(GenerateAnswer(context, request), request.stream)

    @api.post("/tokenize", response_model=responses.TokenizeResponse, responses=_TOKENIZED)
    async def tokenize(request: schemas.TokenizeRequest):
        return JSONResponse(await _tokenized(context, request))

    @api.post("/detokenize", response_model=responses.DetokenizeResponse, operation_id="detokenize")
    async def detokenize(request: schemas.DetokenizeRequest):
        context.check_model(request.model)
        if request.tokens:
            context.check_prompt(request.tokens, "tokens")
        return JSONResponse({"prompt": await context.decode(request.tokens)})


async def _tokenized(context: ServingContext, request: schemas.TokenizeRequest) -> dict[str, Any]:
    """The ids that the same text or messages would have as a prompt, in vLLM's shape."""
    context.check_model(request.model)
    if (request.prompt is None) == (request.messages is None):
        raise invalid("give either prompt or messages", "prompt")
    if request.prompt is not None:
        (tokens,) = await context.encode_texts([request.prompt], request.add_special_tokens)
    else:
        tokens, _ = await context.encode_messages(request)
    names = [context.vocabulary.token(token)[0] for token in tokens] if request.return_token_strs else None
    return {"count": len(tokens), "max_model_len": context.max_length, "tokens": tokens, "token_strs": names}


def _add_information(api: FastAPI, context: ServingContext):
    @api.get("/health", response_model=responses.StatusResponse)
    async def health():
        return JSONResponse({"status": "alive"})

    @api.get("/ready", response_model=responses.StatusResponse)
    async def ready():
        context.pool.check_accepting()
        return JSONResponse({"status": "ready", **context.pool.weights})

    @api.get("/v1/models", response_model=responses.ModelList)
    async def models():
        return JSONResponse({"object": "list", "data": [context.model_card()]})

    @api.get("/v1/models/{name:path}", response_model=responses.ModelCard)
    async def model(name: str):
        context.check_model(name)
        return JSONResponse(context.model_card())

    @api.get("/tokenizer_info", response_model=responses.TokenizerInfo)
    async def tokenizer_info():
        return JSONResponse(context.tokenizer_info())

    @api.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def prometheus():
        text = prometheus_client.generate_latest(context.metrics.registry)
        return Response(text, headers={"Content-Type": prometheus_client.CONTENT_TYPE_LATEST})

    @api.get("/", response_class=Response, responses={200: {"content": {"text/html": {}}}})
    async def page():
        if not PAGE.is_file():
            raise RequestError(404, "this server has no page")
        headers = {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff", "Cache-Control": "no-cache"}
        return FileResponse(PAGE, media_type="text/html", headers=headers)


def _add_admin(api: FastAPI, context: ServingContext):
    async def control(command: str, **fields: str):
        await context.pool.control(command, **fields)
        return JSONResponse({"status": "ok", **context.pool.weights})

    @api.post("/admin/pause", response_model=responses.StatusResponse)
    async def pause(mode: Literal["wait", "abort", "keep"] = "wait"):
        return await control("pause", mode=mode)

    @api.post("/admin/resume", response_model=responses.StatusResponse)
    async def resume():
        return await control("resume")

    @api.post("/admin/weights", response_model=responses.StatusResponse)
    async def weights(request: schemas.WeightsRequest):
        return await control("weights", path=_weights_path(context.config.settings.weights_folder, request.path))


def _weights_path(folder: str | None, given: str) -> str:
    """The path of weights inside the weights folder, also after following links; RequestError 400 for any other one."""
    if folder is None:
        raise RequestError(404, "this server has no weights folder", code="no_weights_folder")
    root = Path(folder).resolve()
    try:
        path = (root / given).resolve(strict=True)
    except (OSError, ValueError, RuntimeError):
        path = None
    if path is None or not path.is_relative_to(root):
        raise invalid("path: no such weights in the weights folder", "path")
    return str(path)
