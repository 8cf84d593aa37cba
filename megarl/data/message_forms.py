"""Forms of messages that published chat templates need: contents as texts or parts, calls with or without a content."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megarl.data.messages import tool_call

Message = Mapping[str, Any]
Form = Callable[[Message], Message]
_ASKED: Message = {"role": "user", "content": "asked_here"}
_CALL = tool_call("call00000", "called_here", {"x": 1})
_CALLED: Message = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_THOUGHT: Message = {"role": "assistant", "content": "<think>\nthought_here\n</think>\n\nsaid_here"}
OPEN, CLOSE = "<think>", "</think>"


def as_it_is(message: Message) -> Message:
    return message


def _with_parts(message: Message) -> Message:
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def _with_text_arguments(message: Message) -> Message:
    if "tool_calls" not in message:
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": to_json(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _without_content(message: Message) -> Message:
    return {**message, "content": None} if "tool_calls" in message and not message["content"] else message


def _with_thoughts_apart(message: Message) -> Message:
    """Of a message whose content begins with thoughts, with these in a field of their own."""
    content = message["content"]
    if message["role"] != "assistant" or "reasoning_content" in message or CLOSE not in content:
        return message
    before, _, said = content.partition(CLOSE)
    return {**message, "reasoning_content": before.replace(OPEN, "", 1).strip(), "content": said.lstrip()}


Rendered = Callable[[Sequence[Message]], str]  # the text of messages; "" where the template fails


def form_of_content(rendered: Rendered) -> Form:
    """The first form in which a template shows contents: as texts, or as parts (SmolVLM)."""
    forms = as_it_is, _with_parts
    return next((form for form in forms if _ASKED["content"] in rendered([form(_ASKED)])), as_it_is)


def form_of_calls(rendered: Rendered) -> Form:
    """The first form in which a template shows calls: some need their arguments as texts (DeepSeek V3.1), or no content
    beside them (DeepSeek R1)."""
    name = _CALL["function"]["name"]
    forms = as_it_is, _with_text_arguments, _without_content, lambda each: _without_content(_with_text_arguments(each))
    return next((form for form in forms if name in rendered([_ASKED, form(_CALLED)])), as_it_is)


def form_of_thoughts(rendered: Rendered) -> Form:
    """As contents have them, or apart for a template that shows empty ones before those of a content (Qwen 3.8)."""
    empty = rendered([_ASKED, _THOUGHT]).partition(_ASKED["content"])[2].count(CLOSE) > 1
    return _with_thoughts_apart if empty else as_it_is


def to_json(value: Any, ensure_ascii: bool = False, indent=None, separators=None, sort_keys: bool = False) -> str:
    """JSON as templates write it: Jinja's own filter escapes <, > and & for web pages."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
