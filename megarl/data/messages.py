"""Messages of a conversation: objects with `role` and `content`, the input of chat templates.

A message of the assistant may hold `tool_calls` and thoughts (`THOUGHTS`); one of a tool, `tool_call_id` and `name`. A
null counts as absent, as does an empty list of calls, and with `tool_calls` `content` may be absent. A content may be a
list of parts of text, which become lines. The role `developer` is the system's. Some published templates need other
forms: contents as parts, calls without a content.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Message = dict[str, Any]
# A message of a prompt as a hashable value: (role, content), or JSON text of one that has more.
MessageKey = tuple[str, str] | str

ROLES = ("system", "developer", "user", "assistant", "tool")
MEDIA = ("image", "image_url", "video", "video_url", "audio", "audio_url", "input_audio")  # types of parts of a content
THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # names of thoughts, in the order in which they are taken
_ROLE_OF = {"tool_calls": "assistant", **dict.fromkeys(THOUGHTS, "assistant"), "tool_call_id": "tool", "name": "tool"}


def message_error(messages: Any) -> str | None:
    """Return what is wrong with a value that should be a list of messages, or None if it is valid."""
    if not isinstance(messages, list) or not messages:
        return "must be a list of messages, at least one"
    return next(filter(None, (_error(message, f"message {n}") for n, message in enumerate(messages, start=1))), None)


def _error(message: Any, which: str) -> str | None:
    if not isinstance(message, dict) or "role" not in message or not {"content", "tool_calls"} & set(message):
        return f"{which} must be an object with role and content"
    role, given = message["role"], _present(message)
    if role not in ROLES:
        return f"{which} has the role {role!r}; allowed: {', '.join(ROLES)}"
    for name, value in given.items():
        if name not in ("role", "content", *_ROLE_OF):
            return f"{which} has an unknown field {name!r}; allowed: role, content, {', '.join(_ROLE_OF)}"
        if _ROLE_OF.get(name, role) != role:
            return f"{which} of the role {role} has {name}, which belongs to the role {_ROLE_OF[name]}"
        if name == "content" and isinstance(value, list):
            parts = [part for part in value if isinstance(part, dict)]
            if media := [part["type"] for part in parts if part.get("type") in MEDIA]:
                needed = "text and images, these with a folder that has a vision tower and with a chat template"
                return f"the content of {which} has a part of the type {media[0]}; megarl reads {needed}"
            texts = [part for part in parts if part.get("type") == "text" and isinstance(part.get("text"), str)]
            if len(texts) < len(value):
                return f'the content of {which} must be a string, or a list of {{"type": "text", "text": "…"}}'
        elif name != "tool_calls" and not isinstance(value, str):
            return f"the {name} of {which} must be a string, not {type(value).__name__}"
    if "content" not in given and "tool_calls" not in given:
        return f"the content of {which} must be a string, not {type(message.get('content')).__name__}"
    return _calls_error(given.get("tool_calls"), which)


def _present(message: Mapping[str, Any]) -> Message:
    """The fields that are there: a null and an empty list of calls, which tables have for want of one, are not."""
    return {name: value for name, value in message.items() if value is not None and (name, value) != ("tool_calls", [])}


def _calls_error(calls: Any, which: str) -> str | None:
    if calls is None:
        return None
    if not isinstance(calls, list) or not calls:
        return f"the tool_calls of {which} must be a list of calls, at least one"
    for number, call in enumerate(calls, start=1):
        where = f"tool call {number} of {which}"
        if not isinstance(call, dict) or not {"function"} <= set(call) <= {"id", "type", "function"}:
            return f"{where} must be an object with function and, optionally, id and type, and nothing else"
        function = call["function"]
        if not isinstance(function, dict) or set(function) != {"name", "arguments"}:
            return f"the function of {where} must be an object with name and arguments, and nothing else"
        if call.get("type") not in (None, "function"):
            return f"the type of {where} must be 'function', not {call['type']!r}"
        if not isinstance(call.get("id"), str | None) or not isinstance(function["name"], str):
            return f"id and name of {where} must be strings"
        try:
            arguments_of(call)
        except ValueError:
            return f"the arguments of {where} must be a JSON object, or the text of one"
    return None


def arguments_of(call: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a tool call as an object; they may be given as its JSON text. ValueError if they are none."""
    arguments = call["function"]["arguments"]
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except RecursionError:
            raise ValueError("nested too deeply") from None
    if not isinstance(arguments, dict):
        raise ValueError("no JSON object")
    return arguments


def tool_call(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    """A call of the assistant's."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def content_of(message: Mapping[str, Any]) -> str:
    """The content as text; "" of an assistant's message that only calls tools."""
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content)
    return "" if content is None else content


def template_message(message: Mapping[str, Any]) -> Message:
    """A valid message as chat templates read it: without nulls, with a text, and with arguments as objects."""
    found = _present(message) | {"content": content_of(message)}
    thoughts = [found.pop(name) for name in THOUGHTS if name in found]
    if thoughts:
        found["reasoning_content"] = thoughts[0]
    if found["role"] == "developer":
        found["role"] = "system"
    if "tool_calls" in found:
        given = [{name: value for name, value in call.items() if value is not None} for call in found["tool_calls"]]
        found["tool_calls"] = [
            {**call, "type": "function", "function": {**call["function"], "arguments": arguments_of(call)}}
            for call in given
        ]
    return found


def with_tool_names(messages: Sequence[Message]) -> list[Message]:
    """Messages in which each result of a tool has the name of its call: clients leave it out, templates show it."""
    calls = [call for message in messages for call in message.get("tool_calls") or () if call.get("id")]
    names, found = {call["id"]: call["function"]["name"] for call in calls}, []
    for message in messages:
        name = message.get("name") or (names.get(message.get("tool_call_id")) if message["role"] == "tool" else None)
        found.append(message if name is None else {**message, "name": name})
    return found


def tools_error(tools: Any) -> str | None:
    """Return what is wrong with a value that should be a list of tools, or None if it is valid."""
    if not isinstance(tools, list) or not tools or not all(isinstance(tool, dict) for tool in tools):
        return "must be a list of tools, each an object with a JSON Schema, at least one"
    return None


def key_of(messages: Sequence[Mapping[str, Any]]) -> tuple[MessageKey, ...]:
    """Messages as a hashable value, from which `conversation_of` makes them again."""
    plain = (template_message(message) for message in messages)
    # The order of the arguments stays: a template writes them in it.
    return tuple(
        (message["role"], message["content"]) if len(message) == 2 else json.dumps(message, ensure_ascii=False)
        for message in plain
    )


def conversation_of(prompt: str | Sequence[MessageKey]) -> list[Message]:
    """A prompt as messages: a string is one user message; else the prompt is what `key_of` gives."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return [
        json.loads(message) if isinstance(message, str) else {"role": message[0], "content": message[1]}
        for message in prompt
    ]


def text_of(messages: Sequence[Mapping[str, Any]]) -> str:
    """Messages as readable text: a single user message as it is, else one `role: content` paragraph per message.
    Thoughts and calls of the assistant have paragraphs of their own: `assistant thinks: …`, `assistant calls f({…})`.
    """
    if [message["role"] for message in messages] == ["user"]:
        return content_of(messages[0])
    return "\n".join(line for message in messages for line in _lines(message))


def _lines(message: Mapping[str, Any]) -> list[str]:
    role, calls = message["role"], message.get("tool_calls") or []
    speaker = f"{role} {message['name']}" if message.get("name") else role
    thoughts = next((message[name] for name in THOUGHTS if message.get(name)), None)
    lines = [] if thoughts is None else [f"{role} thinks: {thoughts}"]
    if content_of(message) or not calls:
        lines.append(f"{speaker}: {content_of(message)}")
    for call in calls:
        arguments = json.dumps(arguments_of(call), ensure_ascii=False)
        lines.append(f"{role} calls {call['function']['name']}({arguments})")
    return lines


# -- forms of messages that published chat templates need --------------------------------------------------------------


Form = Callable[[Mapping[str, Any]], Mapping[str, Any]]
_ASKED: Mapping[str, Any] = {"role": "user", "content": "asked_here"}
_PROBED_CALL = tool_call("call00000", "called_here", {"x": 1})
_PROBED_CALLED: Mapping[str, Any] = {"role": "assistant", "content": "", "tool_calls": [_PROBED_CALL]}
_THOUGHT: Mapping[str, Any] = {"role": "assistant", "content": "<think>\nthought_here\n</think>\n\nsaid_here"}
OPEN, CLOSE = "<think>", "</think>"


def as_it_is(message: Mapping[str, Any]) -> Mapping[str, Any]:
    return message


def _with_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def _with_text_arguments(message: Mapping[str, Any]) -> Mapping[str, Any]:
    if "tool_calls" not in message:
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": to_json(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _without_content(message: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**message, "content": None} if "tool_calls" in message and not message["content"] else message


def _with_thoughts_apart(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of a message whose content begins with thoughts, with these in a field of their own."""
    content = message["content"]
    if message["role"] != "assistant" or "reasoning_content" in message or CLOSE not in content:
        return message
    before, _, said = content.partition(CLOSE)
    return {**message, "reasoning_content": before.replace(OPEN, "", 1).strip(), "content": said.lstrip()}


Rendered = Callable[[Sequence[Mapping[str, Any]]], str]  # the text of messages; "" where the template fails


def form_of_content(rendered: Rendered) -> Form:
    """The first form in which a template shows contents: as texts, or as parts (SmolVLM)."""
    forms = as_it_is, _with_parts
    return next((form for form in forms if _ASKED["content"] in rendered([form(_ASKED)])), as_it_is)


def form_of_calls(rendered: Rendered) -> Form:
    """The first form in which a template shows calls: some need their arguments as texts (DeepSeek V3.1), or no content
    beside them (DeepSeek R1)."""
    name = _PROBED_CALL["function"]["name"]
    forms = as_it_is, _with_text_arguments, _without_content, lambda each: _without_content(_with_text_arguments(each))
    return next((form for form in forms if name in rendered([_ASKED, form(_PROBED_CALLED)])), as_it_is)


def form_of_thoughts(rendered: Rendered) -> Form:
    """As contents have them, or apart for a template that shows empty ones before those of a content (Qwen 3.8)."""
    empty = rendered([_ASKED, _THOUGHT]).partition(_ASKED["content"])[2].count(CLOSE) > 1
    return _with_thoughts_apart if empty else as_it_is


def to_json(value: Any, ensure_ascii: bool = False, indent=None, separators=None, sort_keys: bool = False) -> str:
    """JSON as templates write it: Jinja's own filter escapes <, > and & for web pages."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
