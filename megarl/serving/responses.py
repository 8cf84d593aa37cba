"""Schemas of the answers, for /openapi.json. Nothing is checked against them but in tests."""

# mypy: disable-error-code="valid-type"
# `_answer(…)` makes a type when the module is imported.

from typing import Any, Literal

from pydantic import BaseModel, create_model


def _answer(name: str, text: str, base: type[BaseModel] = BaseModel, /, **fields: Any) -> Any:
    """A schema with a description. `fields`: types, or (type, default)."""
    given: dict[str, Any] = {key: each if isinstance(each, tuple) else (each, ...) for key, each in fields.items()}
    return create_model(name, __doc__=text, __base__=base, __module__=__name__, **given)


_TEXT = str | None

ErrorFields = _answer("ErrorFields", "OpenAI's error.", message=str, type=str, param=_TEXT, code=_TEXT)
ErrorResponse = _answer("ErrorResponse", "Every error answer.", error=ErrorFields)
Usage = _answer("Usage", "Numbers of tokens.", prompt_tokens=int, completion_tokens=int, total_tokens=int)

# -- what the answers of OpenAI's endpoints share ----------------------------------------------------------------------

Choice = _answer(
    "Choice",
    "What the choices of both have.",
    index=int,
    finish_reason=Literal["stop", "length", "abort", "tool_calls"],
    stop_reason=str | int | None,
)
OpenAIResponse = _answer(
    "OpenAIResponse",
    "What both answers of OpenAI's API have.",
    id=str,
    created=int,
    model=str,
    system_fingerprint=_TEXT,
    usage=Usage,
)

# -- completions -------------------------------------------------------------------------------------------------------

CompletionLogprobs = _answer(
    "CompletionLogprobs",
    "One entry for each token; the first of a prompt has no log-prob.",
    tokens=list[str],
    token_logprobs=list[float | None],
    top_logprobs=list[dict[str, float] | None],
    text_offset=list[int],
)
CompletionChoice = _answer("CompletionChoice", "One completion.", Choice, text=str, logprobs=CompletionLogprobs | None)
CompletionResponse = _answer(
    "CompletionResponse",
    "Answer of /v1/completions.",
    OpenAIResponse,
    object=Literal["text_completion"],
    choices=list[CompletionChoice],
)

# -- chat completions --------------------------------------------------------------------------------------------------

TopLogprob = _answer("TopLogprob", "A token that could have been.", token=str, logprob=float, bytes=list[int])
TokenLogprob = _answer("TokenLogprob", "A token of an answer.", TopLogprob, top_logprobs=list[TopLogprob])
ChatLogprobs = _answer("ChatLogprobs", "Log-probs of all tokens of a message.", content=list[TokenLogprob])
CalledFunction = _answer("CalledFunction", "A function call in an answer.", name=str, arguments=str)
AnsweredToolCall = _answer(
    "AnsweredToolCall", "A tool call in an answer.", id=str, type=Literal["function"], function=CalledFunction
)
AnswerMessage = _answer(
    "AnswerMessage",
    "The assistant's message.",
    role=Literal["assistant"],
    content=_TEXT,
    refusal=None,
    reasoning_content=(_TEXT, None),
    tool_calls=(list[AnsweredToolCall] | None, None),
)
ChatChoice = _answer("ChatChoice", "One answer.", Choice, message=AnswerMessage, logprobs=ChatLogprobs | None)
ChatCompletionResponse = _answer(
    "ChatCompletionResponse",
    "Answer of /v1/chat/completions.",
    OpenAIResponse,
    object=Literal["chat.completion"],
    choices=list[ChatChoice],
)

# -- tokens ------------------------------------------------------------------------------------------------------------

RouteData = _answer(
    "RouteData", "Experts of each token: [T, L, k] little-endian int16 in base64.", shape=list[int], data=str
)
GenerateResult = _answer(
    "GenerateResult",
    "Tokens with log-probs and policy versions, equally many.",
    index=int,
    output_ids=list[int],
    logprobs=list[float] | None,
    top_logprobs=list[list[tuple[int, float]]] | None,
    versions=list[int],
    finish_reason=Literal["stop", "length", "abort"],
    system_fingerprint=_TEXT,
    key=int,
    prompt_tokens=int,
    routes=RouteData | None,
)
TokenizeResponse = _answer(
    "TokenizeResponse",
    "Answer of /tokenize.",
    count=int,
    max_model_len=int,
    tokens=list[int],
    token_strs=list[str] | None,
)
DetokenizeResponse = _answer("DetokenizeResponse", "Answer of /detokenize.", prompt=str)

# -- the server --------------------------------------------------------------------------------------------------------

ModelCard = _answer(
    "ModelCard", "A model.", id=str, object=Literal["model"], created=int, owned_by=str, root=str, max_model_len=int
)
ModelList = _answer("ModelList", "Answer of /v1/models.", object=Literal["list"], data=list[ModelCard])
TokenizerInfo = _answer(
    "TokenizerInfo",
    "Answer of /tokenizer_info.",
    eos_token=str,
    bos_token=_TEXT,
    pad_token=_TEXT,
    vocab_size=int,
    chat_template=_TEXT,
)
StatusResponse = _answer(
    "StatusResponse",
    "Answer of /health, /ready and /admin.",
    status=str,
    version=(int | None, None),
    label=(_TEXT, None),
)
