"""Messages of a conversation: objects with `role` and `content`, the input of chat templates."""

from collections.abc import Sequence
from typing import Any

Message = dict[str, str]

ROLES = ("system", "user", "assistant", "tool")


def message_error(messages: Any) -> str | None:
    """Return what is wrong with a value that should be a list of messages, or None if it is valid."""
    if not isinstance(messages, list) or not messages:
        return "must be a list of messages, at least one"
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or set(message) != {"role", "content"}:
            return f"message {number} must be an object with role and content, and nothing else"
        if message["role"] not in ROLES:
            return f"message {number} has the role {message['role']!r}; allowed: {', '.join(ROLES)}"
        if not isinstance(message["content"], str):
            return f"the content of message {number} must be a string, not {type(message['content']).__name__}"
    return None


def conversation_of(prompt: str | Sequence[tuple[str, str]]) -> list[Message]:
    """A prompt as messages: a string is one user message; else the prompt holds (role, content) pairs."""
    pairs = [("user", prompt)] if isinstance(prompt, str) else prompt
    return [{"role": role, "content": content} for role, content in pairs]


def text_of(messages: Sequence[Message]) -> str:
    """Messages as readable text: a single user message as it is, else one `role: content` paragraph per message."""
    if [message["role"] for message in messages] == ["user"]:
        return messages[0]["content"]
    return "\n".join(f"{message['role']}: {message['content']}" for message in messages)
