"""Anthropic's messages for agents: requests and answers of `/v1/messages`."""

import json
import secrets
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.responses import Response

from megarl.data.messages import tool_call, with_tool_names
from megarl.environments.agents.dialect import streamed, turns
from megarl.environments.agents.session import Session
from megarl.environments.calls import Ask, Reply
from megarl.serving.answers import joined_text, offered
from megarl.serving.error_answers import JSONResponse, invalid
from megarl.serving.schemas import FreeObject, Name, Stop, StrictModel, Text, neutral

_IGNORED = ("temperature", "top_p", "top_k")


class _Block(StrictModel):
    cache_control: FreeObject | None = None  # prompts are cached by their tokens


class TextBlock(_Block):
    """A text in a message."""

    type: Literal["text"]
    text: Text
    citations: list[Any] | None = None


class ThinkingBlock(_Block):
    """Thoughts of an earlier answer; the policy's own tokens have them."""

    type: Literal["thinking"]
    thinking: Text
    signature: Text = ""


class ToolUseBlock(_Block):
    """A call that the assistant has made."""

    type: Literal["tool_use"]
    id: Name
    name: Name
    input: FreeObject
    caller: FreeObject | None = None
    toolset_name: None = None


class ToolResultBlock(_Block):
    """What a tool has returned."""

    type: Literal["tool_result"]
    tool_use_id: Name
    content: Text | Annotated[list[TextBlock], Field(max_length=1024)] | None = None
    is_error: bool | None = None
    toolset_name: None = None


_UserBlock = Annotated[TextBlock | ToolResultBlock, Field(discriminator="type")]
_AssistantBlock = Annotated[TextBlock | ThinkingBlock | ToolUseBlock, Field(discriminator="type")]


class SaidMessage[Role, Block](StrictModel):
    """What the user says, and results of tools; or what the assistant has said."""

    role: Role
    content: Text | Annotated[list[Block], Field(max_length=1024)]


_UserMessage = SaidMessage[Literal["user"], _UserBlock]
_AssistantMessage = SaidMessage[Literal["assistant"], _AssistantBlock]


class Tool(_Block):
    """A tool that the assistant may use."""

    name: Annotated[str, Field(min_length=1, max_length=512)]
    description: Text | None = None
    parameters: FreeObject = Field(alias="input_schema")
    type: Literal["custom"] | None = None
    strict: bool | None = None  # no grammar makes the answer fit the schema
    eager_input_streaming: bool | None = None
    defer_loading: neutral(None, False) = None  # type: ignore[valid-type]
    allowed_callers: neutral(None, ["direct"]) = None  # type: ignore[valid-type]


class ToolChoice(StrictModel):
    """Whether the assistant may call tools."""

    type: Literal["auto", "none", "any", "tool"]
    name: Name | None = None
    disable_parallel_tool_use: Literal[False] | None = None


class MessagesRequest(StrictModel):
    """A request for /v1/messages."""

    model: Name
    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)]
    messages: Annotated[
        list[Annotated[_UserMessage | _AssistantMessage, Field(discriminator="role")]],
        Field(min_length=1, max_length=4096),
    ]
    system: Text | Annotated[list[TextBlock], Field(max_length=1024)] | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: ToolChoice | None = None
    stop_sequences: Annotated[list[Stop], Field(max_length=64)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    metadata: FreeObject | None = None
    cache_control: FreeObject | None = None
    service_tier: Name | None = None
    inference_geo: Name | None = None
    speed: Name | None = None
    thinking: neutral(None, {"type": "disabled"}, why="the policy thinks as its template has it think") = None  # type: ignore[valid-type]


async def complete_messages(session: Session, request: MessagesRequest) -> Response:
    """Answers a request with the policy's next turn."""
    (reply,) = await turns(session, ask_of(request), request, _IGNORED, _choice(request))
    head = {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant", "model": request.model}
    stop = "max_tokens" if reply.finish == "length" else "tool_use" if reply.message.get("tool_calls") else "end_turn"
    end = {"stop_reason": stop, "stop_sequence": None}
    usage = {"input_tokens": len(reply.prompt), "output_tokens": len(reply.tokens)}
    answer = {**head, "content": blocks_of(reply), **end, "usage": usage}
    return streamed(_events(answer)) if request.stream else JSONResponse(answer)


def _choice(request: MessagesRequest) -> str | None:
    return request.tool_choice.type if request.tool_choice else None


def ask_of(request: MessagesRequest) -> Ask:
    """What the policy is asked. RequestError 400."""
    messages: list[dict[str, Any]] = []
    if request.system:
        messages.append({"role": "system", "content": joined_text(request.system)})
    for message in request.messages:
        messages += _of_user(message) if message.role == "user" else [_of_assistant(message)]
    if not messages:
        raise invalid("messages: they have no content", "messages")
    stops = tuple(request.stop_sequences or ())
    return Ask(with_tool_names(messages), offered(request.tools, _choice(request)), request.max_tokens, stops)


def _of_user(message: SaidMessage) -> list[dict[str, Any]]:
    """Results of tools as messages of their own, before what the user says."""
    if isinstance(message.content, str):
        return [{"role": "user", "content": message.content}]
    results = [block for block in message.content if isinstance(block, ToolResultBlock)]
    texts = [block for block in message.content if isinstance(block, TextBlock)]
    found = [dict(role="tool", tool_call_id=each.tool_use_id, content=joined_text(each.content)) for each in results]
    return [*found, *([{"role": "user", "content": joined_text(texts)}] if texts else [])]


def _of_assistant(message: SaidMessage) -> dict[str, Any]:
    if isinstance(message.content, str):
        return {"role": "assistant", "content": message.content}
    by_type: dict[str, list[Any]] = {"text": [], "thinking": [], "tool_use": []}
    for block in message.content:
        by_type[block.type].append(block)
    found: dict[str, Any] = {"role": "assistant", "content": joined_text(by_type["text"])}
    if by_type["thinking"]:
        found["reasoning_content"] = "\n".join(block.thinking for block in by_type["thinking"])
    if by_type["tool_use"]:
        found["tool_calls"] = [tool_call(block.id, block.name, block.input) for block in by_type["tool_use"]]
    return found


def blocks_of(reply: Reply) -> list[dict[str, Any]]:
    message = reply.message
    blocks: list[dict[str, Any]] = []
    if message.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": message["reasoning_content"], "signature": ""})
    if message["content"]:
        blocks.append({"type": "text", "text": message["content"]})
    for call in message.get("tool_calls", ()):
        arguments = json.loads(call["function"]["arguments"])
        blocks.append({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": arguments})
    return blocks


def _events(answer: dict[str, Any]) -> Iterator[dict[str, Any]]:
    begun = {**answer, "content": [], "stop_reason": None, "usage": {**answer["usage"], "output_tokens": 0}}
    yield {"type": "message_start", "message": begun}
    for index, block in enumerate(answer["content"]):
        text, thoughts, arguments = block.get("text"), block.get("thinking"), json.dumps(block.get("input", {}))
        of_type: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
            "text": ({"text": ""}, {"type": "text_delta", "text": text}),
            "thinking": ({"thinking": "", "signature": ""}, {"type": "thinking_delta", "thinking": thoughts}),
            "tool_use": ({"input": {}}, {"type": "input_json_delta", "partial_json": arguments}),
        }
        empty, delta = of_type[block["type"]]
        yield {"type": "content_block_start", "index": index, "content_block": {**block, **empty}}
        yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    end = {"stop_reason": answer["stop_reason"], "stop_sequence": None}
    yield {"type": "message_delta", "delta": end, "usage": answer["usage"]}
    yield {"type": "message_stop"}
