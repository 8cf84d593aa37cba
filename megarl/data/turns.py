"""Turns of a conversation as tokens: the first prompt, and what lies between a written turn and the next one.

What the policy wrote is never encoded again. The next prompt is the last one, the written tokens, and a bridge: the
template's text from the end of the assistant's turn to the opening of its next one. The turn ends with a special token,
which no token spans, so the bridge can be encoded by itself.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from megarl.data.conversations import Encoder
from megarl.errors import UsageError

Messages = Sequence[Mapping[str, Any]]
_USER = {"role": "user", "content": "a"}


class TurnTokens:
    """Encodes the messages around turns, and decodes turns."""

    def __init__(self, encoder: Encoder, max_observation_length: int):
        """`max_observation_length`: tokens of a message that follows a turn; a longer one is cut in the middle."""
        self._encoder, self._longest = encoder, max_observation_length
        self._tokenizer, self._template = encoder.tokenizer, encoder.template

    def text(self, tokens: Sequence[int]) -> str:
        """Text of a turn, without the token that ended it."""
        return self._tokenizer.decode(tokens)

    def first_prompt(self, messages: Messages, tools: Sequence[Mapping[str, Any]] | None = None) -> list[int]:
        """Tokens of the prompt with the opening of the assistant's turn; without a template, of the contents by line.

        UsageError if there are tools and no template, or the template fails.
        """
        if self._template is not None:
            return self._encoder.chat_prompt(messages, tools)
        if tools:
            raise UsageError(f"tools need {self._encoder.flag}, which shows them to the policy")
        return self._tokenizer.encode("\n".join(message["content"] for message in messages))

    def bridge(self, messages: Messages) -> list[int]:
        """Tokens after a turn that ended with an end token: the messages, and the opening of the next turn.

        Raises:
            ValueError: there is no message, or it becomes no token.
            UsageError: the template fails on the messages.
        """
        if not messages:
            raise ValueError("the environment answered a turn without a message and did not end the episode")
        shortened = [{**message, "content": self._cut(message["content"])} for message in messages]
        if self._template is None:
            tokens = self._tokenizer.encode("\n".join(message["content"] for message in shortened))
        else:
            rendered = self._template.render([_USER, _dummy_turn(messages), *shortened], add_generation_prompt=True)
            tokens = self._template.encode(self._after_turn(rendered, messages))
        if not tokens:
            raise ValueError("the environment's messages become no token")
        return tokens

    def _after_turn(self, rendered: str, messages: Messages) -> str:
        """The rest of a rendered conversation after the assistant's turn, its second message."""
        opened = self._template.render([_USER], add_generation_prompt=True)
        if not rendered.startswith(opened):
            opened = self._template.render([_USER])
        end = _end_of_turn(self._tokenizer.end_tokens, rendered, len(opened))
        if end is None:
            raise UsageError(f"{self._template.flag}: an assistant's turn ends without an end token of the tokenizer")
        return rendered[end:]

    def _cut(self, content: str) -> str:
        """A content of at most `max_observation_length` tokens; a longer one loses its middle, visibly."""
        tokens = self._tokenizer.encode(content)
        longest, kept = self._longest, self._longest
        while len(tokens) > longest:
            kept = kept * 3 // 4
            half, mark = kept // 2, f"\n[… {len(tokens) - 2 * (kept // 2)} tokens cut …]\n"
            tail = tokens[len(tokens) - half :] if half else []
            content = self._tokenizer.decode(tokens[:half]) + mark + self._tokenizer.decode(tail)
            if len(self._tokenizer.encode(content)) <= longest:
                return content
            if not half:
                return self._tokenizer.decode(tokens[:longest])
        return content


def check_template(encoder: Encoder, roles: Sequence[str]):
    """UsageError if a conversation cannot go on with the template after messages of these roles (user, tool).

    A template that renders an earlier turn in another way once more messages follow has the policy read what it did not
    write, or the run train on what it does not see when it is used.
    """
    template = encoder.template
    if template is None:
        return
    for role in roles:
        before, turn = [_USER], _thinking_turn(role)
        answers = _answers(role)
        one = template.render([*before, turn])
        two = template.render([*before, turn, *answers], add_generation_prompt=True)
        end = _end_of_turn(encoder.tokenizer.end_tokens, one, len(template.render(before)))
        if end is None:
            raise UsageError(f"{template.flag}: an assistant's turn ends without an end token of the tokenizer")
        if not two.startswith(one[:end]):
            raise UsageError(
                f"{template.flag}: rewrites an assistant's turn once a {role} message follows it (it may drop its "
                "thoughts), so an environment cannot answer; give a template that only appends"
            )
        _check_bridge(encoder, role, two[end:], answers)


def _check_bridge(encoder: Encoder, role: str, after: str, answers: Messages):
    """UsageError unless what follows a real turn is what follows the dummy turn of a bridge."""
    longest = 1 << 20
    bridge, expected = TurnTokens(encoder, longest).bridge(answers), encoder.template.encode(after)
    if bridge != expected:
        raise UsageError(
            f"{encoder.template.flag}: what follows an assistant's turn depends on the turn, for a {role} message; an "
            "environment cannot answer with it"
        )


def _dummy_turn(messages: Messages) -> dict[str, Any]:
    """An assistant's message that the messages may follow: with the calls that tools answer."""
    calls = [
        {
            "id": message["tool_call_id"],
            "type": "function",
            "function": {"name": message.get("name", ""), "arguments": {}},
        }
        for message in messages
        if message["role"] == "tool" and message.get("tool_call_id")
    ]
    return {"role": "assistant", "content": "" if calls else "a", **({"tool_calls": calls} if calls else {})}


def _call(call_id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _thinking_turn(role: str) -> dict[str, Any]:
    turn: dict[str, Any] = {"role": "assistant", "content": "<think>\nb\n</think>\n\nc"}
    if role == "tool":
        turn["tool_calls"] = [
            {"id": f"call_0_{i}", "type": "function", "function": {"name": "f", "arguments": {"x": i}}}
            for i in range(2)
        ]
    return turn


def _answers(role: str) -> list[dict[str, Any]]:
    if role == "tool":
        return [{"role": "tool", "tool_call_id": f"call_0_{i}", "name": "f", "content": f"d{i}"} for i in range(2)]
    return [{"role": role, "content": "d"}]


def _end_of_turn(end_tokens: Sequence[str], rendered: str, start: int) -> int | None:
    """Where the first end token after `start` ends; contents have none, as their special tokens are marked."""
    found = re.compile("|".join(map(re.escape, end_tokens))).search(rendered, start)
    return None if found is None else found.end()
