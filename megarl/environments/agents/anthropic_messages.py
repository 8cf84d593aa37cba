"""Anthropic's messages for agents: requests and answers of `/v1/messages`."""

import json
import secrets
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.responses import Response

from megarl.data.messages import tool_call, with_tool_names
from megarl.environments.agents.dialect import name_forced_call, name_ignored, respond, written
from megarl.environments.agents.session import Session
from megarl.environments.calls import Ask, Reply
from megarl.serving.chat_core import function_tool
from megarl.serving.errors import invalid
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


UserContent = (
    Text | Annotated[list[Annotated[TextBlock | ToolResultBlock, Field(discriminator="type")]], Field(max_length=1024)]
)
AssistantContent = (
    Text
    | Annotated[
        list[Annotated[TextBlock | ThinkingBlock | ToolUseBlock, Field(discriminator="type")]], Field(max_length=1024)
    ]
)


class UserMessage(StrictModel):
    """What the user says, and results of tools."""

    role: Literal["user"]
    content: UserContent


class AssistantTurn(StrictModel):
    """What the assistant has said."""

    role: Literal["assistant"]
    content: AssistantContent


class Tool(StrictModel):
    """A tool that the assistant may use."""

    name: Annotated[str, Field(min_length=1, max_length=512)]
    description: Text | None = None
    input_schema: FreeObject
    type: Literal["custom"] | None = None
    cache_control: FreeObject | None = None
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
        list[Annotated[UserMessage | AssistantTurn, Field(discriminator="role")]], Field(min_length=1, max_length=4096)
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
    name_ignored(request, _IGNORED)
    name_forced_call(request.tool_choice and request.tool_choice.type)
    reply = await written(session, _ask(request))
    answer = {
        "id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant", "model": request.model,
        "content": _blocks(reply), "stop_reason": _stop_reason(reply), "stop_sequence": None,
        "usage": {"input_tokens": len(reply.prompt), "output_tokens": len(reply.tokens)},
    }  # fmt: skip
    if request.stream:
        return respond(list(_events(answer)), streams=True, ends=b"")
    return respond([answer])


def _ask(request: MessagesRequest) -> Ask:
    messages: list[dict[str, Any]] = []
    if request.system:
        messages.append({"role": "system", "content": _text(request.system)})
    for message in request.messages:
        messages += _of_user(message) if isinstance(message, UserMessage) else [_of_assistant(message)]
    if not messages:
        raise invalid("messages: they have no content", "messages")
    may_call = bool(request.tools) and (request.tool_choice is None or request.tool_choice.type != "none")
    tools = [function_tool(tool.name, tool.description, tool.input_schema) for tool in request.tools or ()]
    return Ask(
        with_tool_names(messages), tools if may_call else None, request.max_tokens, tuple(request.stop_sequences or ())
    )


def _text(content: str | list[TextBlock] | None) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content or ())


def _of_user(message: UserMessage) -> list[dict[str, Any]]:
    """Results of tools as messages of their own, before what the user says."""
    if isinstance(message.content, str):
        return [{"role": "user", "content": message.content}]
    results = [block for block in message.content if isinstance(block, ToolResultBlock)]
    texts = [block.text for block in message.content if isinstance(block, TextBlock)]
    found = [{"role": "tool", "tool_call_id": block.tool_use_id, "content": _text(block.content)} for block in results]
    return [*found, *([{"role": "user", "content": "\n".join(texts)}] if texts else [])]


def _of_assistant(message: AssistantTurn) -> dict[str, Any]:
    if isinstance(message.content, str):
        return {"role": "assistant", "content": message.content}
    by_type: dict[str, list[Any]] = {"text": [], "thinking": [], "tool_use": []}
    for block in message.content:
        by_type[block.type].append(block)
    found: dict[str, Any] = {"role": "assistant", "content": "\n".join(block.text for block in by_type["text"])}
    if by_type["thinking"]:
        found["reasoning_content"] = "\n".join(block.thinking for block in by_type["thinking"])
    if by_type["tool_use"]:
        found["tool_calls"] = [tool_call(block.id, block.name, block.input) for block in by_type["tool_use"]]
    return found


def _stop_reason(reply: Reply) -> str:
    assert reply.turn is not None
    if reply.finish == "length":
        return "max_tokens"
    return "tool_use" if reply.turn.calls else "end_turn"


def _blocks(reply: Reply) -> list[dict[str, Any]]:
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


def _events(answer: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The events of a stream, each with its name."""
    begun = {**answer, "content": [], "stop_reason": None, "usage": {**answer["usage"], "output_tokens": 0}}
    yield "message_start", {"type": "message_start", "message": begun}
    for index, block in enumerate(answer["content"]):
        of_type: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
            "text": ({"text": ""}, {"type": "text_delta", "text": block.get("text")}),
            "thinking": (
                {"thinking": "", "signature": ""}, {"type": "thinking_delta", "thinking": block.get("thinking")}
            ),
            "tool_use": (
                {"input": {}}, {"type": "input_json_delta", "partial_json": json.dumps(block.get("input", {}))}
            ),
        }  # fmt: skip
        empty, delta = of_type[block["type"]]
        yield (
            "content_block_start",
            {"type": "content_block_start", "index": index, "content_block": {**block, **empty}},
        )
        yield "content_block_delta", {"type": "content_block_delta", "index": index, "delta": delta}
        yield "content_block_stop", {"type": "content_block_stop", "index": index}
    end = {"stop_reason": answer["stop_reason"], "stop_sequence": None}
    yield "message_delta", {"type": "message_delta", "delta": end, "usage": answer["usage"]}
    yield "message_stop", {"type": "message_stop"}
