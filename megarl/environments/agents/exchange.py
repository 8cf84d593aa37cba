"""What an agent asks the policy, and what it gets: between the endpoint of a worker and the leader of the rollout."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from megarl.data.messages import arguments_of, tool_call
from megarl.environments.protocol import Message, Turn

CONTEXT_LENGTH = "context_length_exceeded"  # the code of an error that clients know: a budget is used up


class Ask(NamedTuple):
    """A request for the next turn after these messages, as chat templates read them."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    max_tokens: int | None = None  # of the turn; None: as many as the run allows
    stops: tuple[str, ...] = ()  # texts that end the turn

    @property
    def key(self) -> str:
        """The request as text, equal for equal requests."""
        return json.dumps(self, ensure_ascii=False, sort_keys=True)


class Reply(NamedTuple):
    """What the policy wrote, or why it wrote nothing."""

    turn: Turn | None
    finish: str = "stop"  # or "length": the turn was cut
    prompt: Sequence[int] = ()  # tokens
    tokens: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    error: str = ""  # if there is no turn: the message
    code: str = ""  # of the error
    is_budget: bool = False  # the run's budgets have cut or refused the turn

    @property
    def message(self) -> Message:
        """The assistant's message, with calls as OpenAI writes them."""
        turn = self.turn
        assert turn is not None  # an error is no message
        message: Message = {"role": "assistant", "content": turn.content}
        if turn.errors:  # what looks like a call is no call, so all that was written is content
            message["content"] = turn.text.rpartition("</think>")[2].removeprefix(turn.reasoning).strip()
            message["tool_call_errors"] = list(turn.errors)
        if turn.reasoning:
            message["reasoning_content"] = turn.reasoning
        if turn.calls:
            message["tool_calls"] = [
                tool_call(call.id, call.name, json.dumps(call.arguments, ensure_ascii=False)) for call in turn.calls
            ]
        return message


def canonical(message: Mapping[str, Any]) -> str:
    """A message as text, equal for messages that a client may not tell apart.

    Of the assistant's, thoughts and ids of calls do not count, nor white space around the content: clients drop or
    change them. Arguments are compared as JSON values.
    """
    role, content = message["role"], message.get("content") or ""
    if role != "assistant":
        return json.dumps([role, content, message.get("name"), message.get("tool_call_id")], ensure_ascii=False)
    calls = [[call["function"]["name"], arguments_of(call)] for call in message.get("tool_calls") or ()]
    return json.dumps([role, content.strip(), calls], ensure_ascii=False, sort_keys=True)


def digests(messages: Sequence[Message], tools: list | None = None) -> list[bytes]:
    """A digest of the tools and the messages up to each one."""
    digest = hashlib.blake2b(json.dumps(tools, sort_keys=True).encode(), digest_size=16)
    found = []
    for message in messages:
        text = canonical(message).encode("utf-8", "replace")
        digest.update(len(text).to_bytes(8, "little") + text)
        found.append(digest.digest())
    return found
