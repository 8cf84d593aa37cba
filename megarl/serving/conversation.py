"""Messages and tools of a request as the plain objects that chat templates read."""

import json
from collections.abc import Sequence
from typing import Any

from megarl.serving.errors import invalid
from megarl.serving.schemas import AssistantMessage, SystemMessage, ToolDefinition, ToolMessage, check_json


def template_messages(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Messages of a validated request; contents become strings, arguments of tool calls become objects.

    RequestError 400 for arguments that are not a JSON object.
    """
    return [_message(number, message) for number, message in enumerate(messages)]


def template_tools(tools: Sequence[ToolDefinition]) -> list[dict[str, Any]]:
    """Tools as the client gave them, without what it left out."""
    return [tool.model_dump(exclude_unset=True) for tool in tools]


def _message(number: int, message: Any) -> dict[str, Any]:
    content = message.content
    if isinstance(content, list):
        content = "\n".join(part.text for part in content)
    role = "system" if isinstance(message, SystemMessage) else message.role
    found: dict[str, Any] = {"role": role, "content": content or ""}
    if message.name is not None:
        found["name"] = message.name
    if isinstance(message, ToolMessage):
        found["tool_call_id"] = message.tool_call_id
    if isinstance(message, AssistantMessage) and message.tool_calls:
        found["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(number, call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    return found


def _arguments(number: int, text: str) -> dict[str, Any]:
    try:
        arguments = check_json(json.loads(text or "{}"))
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise invalid(f"messages: the arguments of a tool call in message {number} are no JSON object", "messages")
    return arguments
