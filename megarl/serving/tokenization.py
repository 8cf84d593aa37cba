"""/tokenize, /detokenize and /tokenizer_info, in vLLM's shapes; messages and tools as chat templates read them."""

import json
from collections.abc import Sequence
from typing import Any

from megarl.data.messages import template_message, with_tool_names
from megarl.serving.context import ServingContext
from megarl.serving.errors import invalid
from megarl.serving.schemas import (
    AssistantMessage,
    DetokenizeRequest,
    TokenizeRequest,
    ToolDefinition,
    check_json,
)


async def tokenize(context: ServingContext, request: TokenizeRequest) -> dict[str, Any]:
    """The ids that the same text or messages would have as a prompt."""
    context.check_model(request.model)
    if (request.prompt is None) == (request.messages is None):
        raise invalid("give either prompt or messages", "prompt")
    if request.prompt is not None:
        (tokens,) = await context.encode_texts([request.prompt], request.add_special_tokens)
    else:
        tools = template_tools(request.tools) if request.tools else None
        messages = template_messages(request.messages or [])
        tokens = await context.encode_chat(messages, tools, request.chat_template_kwargs)
    names = [context.vocabulary.token(token)[0] for token in tokens] if request.return_token_strs else None
    return {"count": len(tokens), "max_model_len": context.max_length, "tokens": tokens, "token_strs": names}


async def detokenize(context: ServingContext, request: DetokenizeRequest) -> dict[str, Any]:
    """The text of ids, without special tokens."""
    context.check_model(request.model)
    if request.tokens:
        context.check_prompt(request.tokens, "tokens")
    return {"prompt": await context.decode(request.tokens)}


def tokenizer_info(context: ServingContext) -> dict[str, Any]:
    """Special tokens and chat template, for clients that tokenize with this server, such as lm-eval."""
    tokenizer, template = context.encoder.tokenizer, context.encoder.template
    return {
        "eos_token": tokenizer.eos_token,
        "bos_token": tokenizer.bos_token,
        "pad_token": None,
        "vocab_size": context.config.vocab_size,
        "chat_template": template.source if template else None,
    }


def template_messages(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Messages of a validated request; contents become strings, arguments of tool calls become objects,
    and results of tools get their names.

    RequestError 400 for arguments that are no JSON object.
    """
    return with_tool_names([_message(number, message) for number, message in enumerate(messages)])


def template_tools(tools: Sequence[ToolDefinition]) -> list[dict[str, Any]]:
    """Tools with what describes them; wishes to the server (`strict`, `cache_control`) and nulls are not shown."""
    return [function_tool(tool.function.name, tool.function.description, tool.function.parameters) for tool in tools]


def function_tool(name: str, description: str | None, parameters: dict[str, Any] | None) -> dict[str, Any]:
    """A tool as chat templates read it."""
    fields = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": {name: value for name, value in fields.items() if value is not None}}


def _message(number: int, message: Any) -> dict[str, Any]:
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
