"""Schemas of the answers, for /openapi.json."""

from typing import Literal

from pydantic import BaseModel


class ErrorFields(BaseModel):
    """OpenAI's error."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """Every error answer."""

    error: ErrorFields


class Usage(BaseModel):
    """Numbers of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionLogprobs(BaseModel):
    """One entry for each token; the first of a prompt has no log-prob."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class Choice(BaseModel):
    """What the choices of both have."""

    index: int
    finish_reason: Literal["stop", "length", "abort", "tool_calls"]
    stop_reason: str | int | None


class CompletionChoice(Choice):
    """One completion."""

    text: str
    logprobs: CompletionLogprobs | None


class OpenAIResponse(BaseModel):
    """What both answers of OpenAI's API have."""

    id: str
    created: int
    model: str
    system_fingerprint: str | None
    usage: Usage


class CompletionResponse(OpenAIResponse):
    """Answer of /v1/completions."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class TopLogprob(BaseModel):
    """A token that could have been."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A token of an answer."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Log-probs of all tokens of a message."""

    content: list[TokenLogprob]


class CalledFunction(BaseModel):
    """A function call in an answer."""

    name: str
    arguments: str


class AnsweredToolCall(BaseModel):
    """A tool call in an answer."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AnswerMessage(BaseModel):
    """The assistant's message."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    tool_calls: list[AnsweredToolCall] | None = None


class ChatChoice(Choice):
    """One answer."""

    message: AnswerMessage
    logprobs: ChatLogprobs | None


class ChatCompletionResponse(OpenAIResponse):
    """Answer of /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class RouteData(BaseModel):
    """Experts of each token: [T, L, k] little-endian int16 in base64."""

    shape: list[int]
    data: str


class GenerateResult(BaseModel):
    """Tokens with log-probs and policy versions, equally many."""

    index: int
    output_ids: list[int]
    logprobs: list[float] | None
    top_logprobs: list[list[tuple[int, float]]] | None
    versions: list[int]
    finish_reason: Literal["stop", "length", "abort"]
    system_fingerprint: str | None
    key: int
    prompt_tokens: int
    routes: RouteData | None


class ModelCard(BaseModel):
    """A model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int


class ModelList(BaseModel):
    """Answer of /v1/models."""

    object: Literal["list"]
    data: list[ModelCard]


class TokenizeResponse(BaseModel):
    """Answer of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeResponse(BaseModel):
    """Answer of /detokenize."""

    prompt: str


class TokenizerInfo(BaseModel):
    """Answer of /tokenizer_info."""

    eos_token: str
    bos_token: str | None
    pad_token: str | None
    vocab_size: int
    chat_template: str | None


class StatusResponse(BaseModel):
    """Answer of /health, /ready and /admin."""

    status: str
    version: int | None = None
    label: str | None = None
