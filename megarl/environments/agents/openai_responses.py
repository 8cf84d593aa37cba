"""OpenAI's responses for agents: requests and answers of `/v1/responses`. Nothing is stored between requests."""

import itertools
import secrets
import time
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag
from starlette.responses import Response

from megarl.data.messages import tool_call, with_tool_names
from megarl.environments.agents.dialect import streamed, token_fields, turns
from megarl.environments.agents.session import Session
from megarl.environments.calls import Ask, Reply
from megarl.serving.answers import call_arguments, joined_text, offered
from megarl.serving.error_answers import JSONResponse, invalid
from megarl.serving.schemas import (
    CacheFields,
    FreeObject,
    FunctionDefinition,
    Name,
    ServiceFields,
    StrictModel,
    Text,
    TokenFields,
    Unread,
    neutral,
)

_IGNORED = ("temperature", "top_p")
_COMPLETED = {"status": "completed", "incomplete_details": None}
_CACHED, _REASONED = {"cached_tokens": 0, "cache_write_tokens": 0}, {"reasoning_tokens": 0}
_DETAILS = {"input_tokens_details": _CACHED, "output_tokens_details": _REASONED}


class InputText(CacheFields):
    """A text in a message."""

    type: Literal["input_text", "output_text"]
    text: Text
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    parsed: Unread = None  # of openai's helpers, from `text`


class InputMessage(TokenFields):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["user", "system", "developer", "assistant"]
    content: Text | Annotated[list[InputText], Field(max_length=1024)]
    id: Name | None = None
    status: Name | None = None
    phase: Name | None = None


class CallItem(TokenFields):
    """A call that the assistant has made."""

    type: Literal["function_call"]
    call_id: Name
    name: Name
    arguments: Text
    id: Name | None = None
    status: Name | None = None
    namespace: None = None
    caller: FreeObject | None = None
    async_: None = None  # so openai's client writes `async`
    parsed_arguments: Unread = None  # of openai's helpers, from `arguments`


class CallOutput(StrictModel):
    """What a tool has returned."""

    type: Literal["function_call_output"]
    call_id: Name
    output: Text | Annotated[list[InputText], Field(max_length=1024)]
    id: Name | None = None
    status: Name | None = None
    name: Name | None = None
    namespace: None = None
    caller: FreeObject | None = None


class ReasoningText(StrictModel):
    """A part of thoughts."""

    type: Literal["reasoning_text"]
    text: Text


class ReasoningItem(TokenFields):
    """Thoughts of an earlier answer; a summary of them is not read."""

    type: Literal["reasoning"]
    id: Name | None = None
    summary: list[Any] = []  # noqa: RUF012  # pydantic copies it
    content: Annotated[list[ReasoningText], Field(max_length=1024)] | None = None
    encrypted_content: None = None
    status: Name | None = None


def _kind_of(item: Any) -> str | None:  # a message may leave it out
    return item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)


_Calls = Annotated[CallItem, Tag("function_call")] | Annotated[CallOutput, Tag("function_call_output")]
_Texts = Annotated[InputMessage, Tag("message")] | Annotated[ReasoningItem, Tag("reasoning")]
Item = Annotated[_Texts | _Calls, Discriminator(_kind_of)]


class FunctionTool(FunctionDefinition, CacheFields):
    """A tool that the assistant may use."""

    type: Literal["function"]


class ResponsesRequest(ServiceFields):
    """A request for /v1/responses."""

    model: Name | None = None
    input: Text | Annotated[list[Item], Field(min_length=1, max_length=4096)]
    instructions: Text | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=128)] | None = None
    tool_choice: Literal["auto", "none", "required"] | FreeObject | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    parallel_tool_calls: Literal[True] | None = None
    include: Annotated[list[Name], Field(max_length=16)] | None = None
    reasoning: FreeObject | None = None
    truncation: Literal["disabled"] | None = None
    user: Name | None = None
    prompt_cache_key: Name | None = None
    text: neutral(None, {}, {"format": {"type": "text"}}) = None  # type: ignore[valid-type]
    top_logprobs: neutral(None, 0) = None  # type: ignore[valid-type]
    background: neutral(None, False) = None  # type: ignore[valid-type]
    previous_response_id: neutral(None, why="nothing is stored between requests") = None  # type: ignore[valid-type]
    conversation: neutral(None, why="nothing is stored between requests") = None  # type: ignore[valid-type]
    prompt: neutral(None, why="nothing is stored between requests") = None  # type: ignore[valid-type]


async def complete_response(session: Session, request: ResponsesRequest) -> Response:
    """Answers a request with the policy's next turn."""
    (reply,) = await turns(session, ask_of(request), request, _IGNORED, request.tool_choice)
    answer = answer_of(request, reply)
    answer["output"][-1] |= token_fields(session, reply)  # where NeMo Gym looks for them
    return streamed(_events(answer)) if request.stream else JSONResponse(answer)


def ask_of(request: ResponsesRequest) -> Ask:
    """What the policy is asked. RequestError 400."""
    messages: list[dict[str, Any]] = []
    if request.instructions:
        messages.append({"role": "system", "content": request.instructions})
    items = [InputMessage(role="user", content=request.input)] if isinstance(request.input, str) else request.input
    for item in items:
        _add(messages, item)
    if not messages:
        raise invalid("input: it has no message", "input")
    return Ask(with_tool_names(messages), offered(request.tools, request.tool_choice), request.max_output_tokens)


def _add(messages: list[dict[str, Any]], item: Any):
    """Adds an item: a call belongs to the message of the assistant before it."""
    if isinstance(item, InputMessage):
        role = "system" if item.role == "developer" else item.role
        last = messages[-1] if messages and role == "assistant" else {}
        if "reasoning_content" in last and not last["content"] and "tool_calls" not in last:  # it has only thoughts
            last["content"] = joined_text(item.content)
        else:
            messages.append({"role": role, "content": joined_text(item.content)})
    elif isinstance(item, ReasoningItem):
        if thoughts := "".join(part.text for part in item.content or ()):
            messages.append({"role": "assistant", "content": "", "reasoning_content": thoughts})
    elif isinstance(item, CallOutput):
        messages.append({"role": "tool", "tool_call_id": item.call_id, "content": joined_text(item.output)})
    elif isinstance(item, CallItem):
        arguments = call_arguments(item.arguments)
        if arguments is None:
            raise invalid("input: the arguments of a function_call are no JSON object", "input")
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        messages[-1].setdefault("tool_calls", []).append(tool_call(item.call_id, item.name, arguments))


def answer_of(request: ResponsesRequest, reply: Reply) -> dict[str, Any]:
    prompt, written = len(reply.prompt), len(reply.tokens)
    is_cut = reply.finish == "length"
    answer = dict(id=f"resp_{secrets.token_hex(12)}", object="response", created_at=int(time.time()), error=None)
    answer |= dict(status="incomplete", incomplete_details={"reason": "max_output_tokens"}) if is_cut else _COMPLETED
    answer |= dict(model=request.model or "policy", instructions=request.instructions, output=_items(reply))
    answer |= dict(tool_choice=request.tool_choice or "auto", tools=[tool.model_dump() for tool in request.tools or ()])
    answer |= dict(metadata=request.metadata or {}, parallel_tool_calls=True, previous_response_id=None)
    usage = dict(input_tokens=prompt, output_tokens=written, total_tokens=prompt + written, **_DETAILS)
    return answer | dict(temperature=None, top_p=None, usage=usage)


def _items(reply: Reply) -> list[dict[str, Any]]:
    message, items = reply.message, []
    if message.get("reasoning_content"):
        thoughts = [{"type": "reasoning_text", "text": message["reasoning_content"]}]
        items.append({"type": "reasoning", "id": f"rs_{secrets.token_hex(12)}", "summary": [], "content": thoughts})
    if message["content"] or not message.get("tool_calls"):
        text = {"type": "output_text", "text": message["content"], "annotations": []}
        head = {"type": "message", "id": f"msg_{secrets.token_hex(12)}", "role": "assistant", "status": "completed"}
        items.append({**head, "content": [text]})
    for call in message.get("tool_calls", ()):
        head = {"type": "function_call", "id": f"fc_{secrets.token_hex(12)}", "call_id": call["id"]}
        items.append({**head, "status": "completed", **call["function"]})
    return items


def _events(answer: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The events of a stream, each with its number."""
    numbers = itertools.count()

    def event(name: str, /, **fields: Any) -> dict[str, Any]:
        return {"type": name, "sequence_number": next(numbers), **fields}

    begun = {**answer, "output": [], "status": "in_progress", "usage": None}
    yield event("response.created", response=begun)
    for index, item in enumerate(answer["output"]):
        place = {"item_id": item["id"], "output_index": index}
        empty = {**item, **({"arguments": ""} if item["type"] == "function_call" else {"content": []})}
        yield event("response.output_item.added", output_index=index, item=empty)
        if item["type"] == "message":
            part, at = item["content"][0], {**place, "content_index": 0}
            yield event("response.content_part.added", **at, part={**part, "text": ""})
            yield event("response.output_text.delta", **at, delta=part["text"], logprobs=[])
            yield event("response.output_text.done", **at, text=part["text"], logprobs=[])
            yield event("response.content_part.done", **at, part=part)
        elif item["type"] == "function_call":
            yield event("response.function_call_arguments.delta", **place, delta=item["arguments"])
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield event("response.function_call_arguments.done", **place, **done)
        yield event("response.output_item.done", output_index=index, item=item)
    yield event("response.completed", response=answer)
