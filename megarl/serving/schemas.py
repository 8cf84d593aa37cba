"""Requests of all endpoints: OpenAI's fields and vLLM's, each with its limits; unknown fields are errors.

Fields whose neutral value clients often send, but which have no effect here, are allowed with that value only. Wishes
to a service, which change neither the prompt nor the answer, are allowed with any value: `ServiceFields`,
`CacheFields`, and `strict` of a tool.
"""

# mypy: disable-error-code="valid-type"
# `neutral(…)` makes a type when the module is imported.

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema

from megarl.data.chat import RESERVED
from megarl.serving.error_answers import echo
from megarl.tool_formats.written_calls import inside

MAX_TEXT_LENGTH = 2**24  # characters
MAX_IMAGE_LENGTH = 2**25  # characters of a data: URL; `decoding.MAX_BYTES` is the limit of the image
MAX_TOKENS = 2**24
MAX_PROMPTS = 4096

_MAX_DEPTH, _MAX_FREE_VALUES = 64, 2**16  # levels and values of free-form JSON


def neutral(*values: Any, why: str = "") -> Any:
    """The type of a field that only has values without effect. `why`: another is refused."""

    def check(value: Any) -> Any:
        if not any(type(value) is not bool and value == each or value is each for each in values):
            allowed = ", ".join(json.dumps(each) for each in values)
            raise ValueError(f"{echo(value)} is not supported{why and f', because {why}'}; allowed: {allowed}")
        return value

    return Annotated[Any, AfterValidator(check), WithJsonSchema({"enum": list(values)})]


def _check_temperature(value: float | None) -> float | None:
    if value is not None and 0 < value < 0.01:
        raise ValueError("allowed are 0, for the most likely token, and 0.01 to 2")
    return value


def check_json(value: Any) -> Any:
    """Free-form JSON that can be walked through and written: not too deep or too long, and valid Unicode."""
    level, depth, count = [value], 0, 0
    while level:
        depth += 1
        if depth > _MAX_DEPTH:
            raise ValueError(f"deeper than {_MAX_DEPTH} levels")
        level = [outer for outer in level if isinstance(outer, dict | list)]
        count += sum(map(len, level))
        if count > _MAX_FREE_VALUES:
            raise ValueError(f"more than {_MAX_FREE_VALUES} values")
        level = [each for outer in level for each in inside(outer)]
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        raise ValueError("not valid Unicode") from None
    return value


def _check_template_values(value: dict[str, Any]) -> dict[str, Any]:
    if reserved := RESERVED & value.keys():
        raise ValueError(f"{echo(min(reserved))} is a field of the request")
    return value


Text = Annotated[str, Field(max_length=MAX_TEXT_LENGTH)]
Name = Annotated[str, Field(max_length=512)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
# Lists that may be long stop at the first wrong item: millions of errors would hold the interpreter for half a minute.
TokenIds = Annotated[list[TokenId], Field(max_length=MAX_TOKENS, fail_fast=True)]
Prompt = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_TOKENS, fail_fast=True)]
Stop = Annotated[str, Field(min_length=1, max_length=256)]
Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Temperature = Annotated[float, Field(ge=0, le=2), AfterValidator(_check_temperature)]
FreeObject = Annotated[dict[str, Any], AfterValidator(check_json)]
Unread = Annotated[Any, AfterValidator(check_json)]  # what a client has added to an answer for itself
TemplateValues = Annotated[dict[str, Any], AfterValidator(check_json), AfterValidator(_check_template_values)]


class StrictModel(BaseModel):
    """No unknown fields, no conversion of types, no infinite numbers."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class ServiceFields(StrictModel):
    """Wishes to a service: what it stores of a request, whom it bills, how fast it answers."""

    metadata: FreeObject | None = None
    store: bool | None = None
    service_tier: Name | None = None
    safety_identifier: Name | None = None
    prompt_cache_retention: Name | None = None
    prompt_cache_options: FreeObject | None = None


class CacheFields(StrictModel):
    """Marks of what a service should cache: Anthropic's, which clients also send to others, and OpenAI's."""

    cache_control: FreeObject | None = None
    prompt_cache_breakpoint: FreeObject | None = None


class StreamOptions(StrictModel):
    """Options of a stream."""

    include_usage: bool | None = None
    include_obfuscation: neutral(None, False) = None


class SamplingFields(StrictModel):
    """How tokens are sampled, and when a response ends."""

    temperature: Temperature | None = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] | None = 1.0
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = 0
    min_p: Annotated[float, Field(ge=0, le=1)] | None = 0.0
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64)] | None = None
    ignore_eos: bool = False
    thinking_budget: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    thinking_budget_text: Annotated[str, Field(min_length=1, max_length=4096)] | None = None


class OpenAIFields(SamplingFields):
    """Fields that both of OpenAI's endpoints have."""

    model: Name | None = None
    n: Annotated[int, Field(ge=1, le=1024)] | None = 1
    seed: Int64 | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=64)] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    user: Name | None = None
    prompt_cache_key: Name | None = None
    include_stop_str_in_output: bool = False
    frequency_penalty: neutral(None, 0) = None
    presence_penalty: neutral(None, 0) = None
    repetition_penalty: neutral(None, 1) = None
    logit_bias: neutral(None, {}) = None
    min_tokens: neutral(None, 0) = None
    skip_special_tokens: neutral(None, True) = None

    @property
    def stops(self) -> list[str]:
        """The stop strings."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def session(self) -> str | None:
        """Whose requests one replica should get."""
        return self.prompt_cache_key or self.user


class CompletionRequest(OpenAIFields):
    """A request for /v1/completions."""

    prompt: (
        Text
        | TokenIds
        | Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    )
    max_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=2**10)] | None = None
    echo: bool | None = False
    add_special_tokens: bool = True
    best_of: neutral(None, 1) = None
    suffix: neutral(None, "") = None


class TextPart(CacheFields):
    """A part of a message's content."""

    type: Literal["text"]
    text: Text


class ImageUrl(StrictModel):
    """An image; `url` is a data: URL, since nothing is fetched. `detail` changes nothing."""

    url: Annotated[str, Field(min_length=1, max_length=MAX_IMAGE_LENGTH)]
    detail: Literal["auto", "low", "high"] | None = None


class ImagePart(CacheFields):
    """A part of a message's content that is an image."""

    type: Literal["image_url"]
    image_url: ImageUrl


Part = Annotated[TextPart | ImagePart, Field(discriminator="type")]
Content = Text | Annotated[list[Part], Field(min_length=1, max_length=1024)]


class FunctionCall(StrictModel):
    """A call of a function; `arguments` is a JSON object as a string."""

    name: Name
    arguments: Text
    parsed_arguments: Unread = None  # of openai's helpers, from `arguments`


class AssistantToolCall(StrictModel):
    """A tool call that the assistant has made."""

    id: Name
    type: Literal["function"] = "function"
    function: FunctionCall
    index: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None


class PlainMessage(CacheFields):
    """Instructions, or what the user says."""

    role: Literal["system", "developer", "user"]
    content: Content
    name: Name | None = None


class TokenFields(StrictModel):
    """Tokens of an answer in a session of a training run, which clients send back; they are not read."""

    prompt_token_ids: TokenIds | None = None
    generation_token_ids: TokenIds | None = None
    generation_log_probs: Annotated[list[float], Field(max_length=MAX_TOKENS, fail_fast=True)] | None = None
    routed_experts: neutral(None) = None  # what NeMo Gym adds to the others


class AssistantMessage(TokenFields, CacheFields):
    """What the assistant has said; the fields of an answer that are null may stay."""

    role: Literal["assistant"]
    content: Text | Annotated[list[TextPart], Field(max_length=1024)] | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = None
    name: Name | None = None
    tool_calls: Annotated[list[AssistantToolCall], Field(max_length=128)] | None = None
    tool_call_errors: Annotated[list[Text], Field(max_length=1024)] | None = None  # of an agent's endpoint
    refusal: neutral(None) = None
    audio: neutral(None) = None
    annotations: neutral(None, []) = None
    function_call: neutral(None) = None
    parsed: Unread = None  # of openai's helpers, from `content`


class ToolMessage(CacheFields):
    """What a tool has returned."""

    role: Literal["tool"]
    content: Content
    tool_call_id: Name
    name: Name | None = None


ChatMessage = Annotated[PlainMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


class FunctionDefinition(StrictModel):
    """A function that may be called; `parameters` is a JSON Schema. `strict`: no grammar makes the answer fit it."""

    name: Annotated[str, Field(min_length=1, max_length=512)]
    description: Text | None = None
    parameters: FreeObject | None = None
    strict: bool | None = None


class ToolDefinition(CacheFields):
    """A tool that the assistant may use."""

    type: Literal["function"]
    function: FunctionDefinition


_UNCONSTRAINED = "nothing constrains what the policy writes"
_NOT_READ = "no chat template reads it; chat_template_kwargs gives a template its variables"


class ChatCompletionRequest(OpenAIFields, ServiceFields):
    """A request for /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=4096)]
    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=2**10)] | None = None
    tools: Annotated[list[ToolDefinition], Field(max_length=128)] | None = None
    tool_choice: neutral(None, "none", "auto", why=_UNCONSTRAINED) = None
    chat_template_kwargs: TemplateValues | None = None
    response_format: neutral(None, {"type": "text"}, why=_UNCONSTRAINED) = None
    parallel_tool_calls: neutral(None, True, why=_UNCONSTRAINED) = None
    modalities: neutral(None, ["text"]) = None
    reasoning_effort: neutral(None, why=_NOT_READ) = None
    verbosity: neutral(None, why=_NOT_READ) = None
    audio: neutral(None) = None
    prediction: neutral(None) = None
    moderation: neutral(None) = None
    web_search_options: neutral(None) = None
    functions: neutral(None, [], why="it is called tools") = None
    function_call: neutral(None, "none", "auto", why="it is called tool_choice") = None


class GenerateSampling(SamplingFields):
    """Sampling of /generate. The tokens of a stop string stay in the response."""

    stop: Annotated[list[Stop], Field(max_length=64)] = []
    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None


class GenerateRequest(StrictModel):
    """A request for /generate: tokens to tokens. `key` is the exact key of the random stream, one for each prompt."""

    input_ids: Prompt | Annotated[list[Prompt], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    sampling_params: GenerateSampling = GenerateSampling()
    seed: Int64 | None = None
    key: Int64 | Annotated[list[Int64], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)] | None = None
    session: Name | None = None
    return_logprobs: bool = True
    top_logprobs: Annotated[int, Field(ge=0, le=2**10)] = 0
    return_routes: bool = False
    stream: bool = False


class TokenizeRequest(StrictModel):
    """A request for /tokenize: a text, or messages with the chat template."""

    model: Name | None = None
    prompt: Text | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=4096)] | None = None
    tools: Annotated[list[ToolDefinition], Field(max_length=128)] | None = None
    chat_template_kwargs: TemplateValues | None = None
    add_special_tokens: bool = True
    return_token_strs: bool | None = False


class DetokenizeRequest(StrictModel):
    """A request for /detokenize."""

    model: Name | None = None
    tokens: TokenIds


class WeightsRequest(StrictModel):
    """A request for /admin/weights: a path inside the weights folder, absolute or relative to it."""

    path: Annotated[str, Field(min_length=1, max_length=4096)]
