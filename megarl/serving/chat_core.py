"""OpenAI's chat completions, for the server and for agents: a request as chat templates read it, and its answer."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from megarl.data.messages import template_message, with_tool_names
from megarl.serving.answers import OpenAIAnswer
from megarl.serving.error_answers import invalid
from megarl.serving.schemas import AssistantMessage, ChatCompletionRequest, ImagePart, check_json


def conversation(request: ChatCompletionRequest) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """(messages, tools that may be called) of a request; None: no call may be made. RequestError 400."""
    tools = [tool.function for tool in request.tools or ()]
    return template_messages(request.messages), offered(tools, request.tool_choice)


def template_messages(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Messages of a validated request as chat templates read them, with names of results of tools.

    RequestError 400 for arguments that are no JSON object.
    """
    return with_tool_names([_message(number, message) for number, message in enumerate(messages)])


def offered(tools: Sequence[Any] | None, choice: Any = None) -> list[dict[str, Any]] | None:
    """Tools as chat templates read them, without nulls and wishes to the server; None: no call may be made."""
    fields = [dict(name=tool.name, description=tool.description, parameters=tool.parameters) for tool in tools or ()]
    shown = [{name: value for name, value in each.items() if value is not None} for each in fields]
    return [{"type": "function", "function": each} for each in shown] if choice != "none" and shown else None


def joined_text(content: Any) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content or ())


def image_urls(messages: Sequence[Any]) -> list[str]:
    """The URLs of the images in messages of a validated request."""
    contents = [message.content for message in messages if isinstance(message.content, list)]
    return [part.image_url.url for content in contents for part in content if isinstance(part, ImagePart)]


def with_marks(messages: Sequence[Any], marks: Iterable[str]) -> list[Any]:
    """Messages in which the images are `marks`, in order; texts beside an image follow each other as in templates."""
    waiting, found = iter(marks), []
    for message in messages:
        if image_urls([message]):
            parts = (next(waiting) if isinstance(part, ImagePart) else part.text for part in message.content)
            message = message.model_copy(update={"content": "".join(parts)})
        found.append(message)
    return found


def _message(number: int, message: Any) -> dict[str, Any]:
    if image_urls([message]):
        raise invalid(f"messages: message {number} has an image, which is not read here", "messages")
    fields = message.model_dump(include={"role", "content", "name", "tool_call_id"})
    if isinstance(message, AssistantMessage):
        fields["reasoning_content"] = message.reasoning_content or message.reasoning or None
        calls = [(call.id, call.function) for call in message.tool_calls or ()]
        fields["tool_calls"] = [
            {"id": name, "function": {"name": called.name, "arguments": _arguments(number, called.arguments)}}
            for name, called in calls
        ]
    return template_message(fields)


def call_arguments(text: str) -> dict[str, Any] | None:
    """The arguments of a call from their text; None if they are no JSON object that the schemas allow."""
    try:
        arguments = check_json(json.loads(text or "{}"))
    except (ValueError, RecursionError):
        return None
    arguments = {} if arguments is None else arguments  # what clients send of a call without arguments
    return arguments if isinstance(arguments, dict) else None


def _arguments(number: int, text: str) -> dict[str, Any]:
    arguments = call_arguments(text)
    if arguments is None:
        raise invalid(f"messages: the arguments of a tool call in message {number} are no JSON object", "messages")
    return arguments


# -- answers -----------------------------------------------------------------------------------------------------------


class ChatAnswer(OpenAIAnswer):
    """The answer to one request with `count` choices; each part has a `delta`, the first of a choice its role."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, model: str, request: ChatCompletionRequest, count: int):
        super().__init__(model, request)
        self._count, self._wants_logprobs = count, bool(request.logprobs)

    def empty_choices(self) -> list[dict[str, Any]]:
        found = [dict(index=k, message=dict(role="assistant", content="", refusal=None)) for k in range(self._count)]
        return [{**each, "logprobs": {"content": []} if self._wants_logprobs else None} for each in found]

    def merge(self, choice: dict[str, Any], part: dict[str, Any]):
        message, delta = choice["message"], part["delta"]
        message["content"] += delta.get("content", "")
        if "reasoning_content" in delta:
            message["reasoning_content"] = message.get("reasoning_content", "") + delta["reasoning_content"]
        for call in delta.get("tool_calls", ()):
            message.setdefault("tool_calls", []).append({name: call[name] for name in ("id", "type", "function")})
        if part["logprobs"] is not None:
            choice["logprobs"]["content"] += part["logprobs"]["content"]
        if part["finish_reason"] and "tool_calls" in message:
            message["content"] = message["content"] or None
        super().merge(choice, part)


def chat_part(
    index: int,
    delta: dict[str, Any],
    finish: str | None = None,
    has_calls: bool = False,
    logprobs: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """A part of a choice. `finish`: "stop", "length" or "abort", with the last one; `has_calls`: of the choice."""
    reason = "tool_calls" if finish == "stop" and has_calls else finish
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


def delta_of(content: str, reasoning: str, calls: Sequence[dict[str, Any]], first: int = 0) -> dict[str, Any]:
    """What a text adds to a choice. `first`: the number of the first of these calls."""
    texts = {"content": content, "reasoning_content": reasoning}
    delta: dict[str, Any] = {name: text for name, text in texts.items() if text}
    if calls:
        delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(calls, start=first)]
    return delta
