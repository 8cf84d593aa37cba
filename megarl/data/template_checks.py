"""Checks at the start of a run that a conversation can continue with a chat template.

A template that renders an earlier turn in another way once more messages follow has the run train on what the policy
never sees when it is used. Probes render conversations with thoughts, tool calls and several turns.
"""

from collections.abc import Sequence
from typing import Any

from megarl.data.conversations import Encoder
from megarl.data.turns import TurnTokens, end_of_turn
from megarl.errors import UsageError

Message = dict[str, Any]
_THOUGHT, _ANSWER = "thought", "reply"
_TOOLS = [{"type": "function", "function": {
    "name": "probe", "description": "A tool.",
    "parameters": {"type": "object", "properties": {"x": {"type": "integer", "description": "A number."}},
                   "required": ["x"]},
}}]  # fmt: skip
_ADVICE = (
    "give a template (a Jinja file) that keeps earlier turns as they are and appends what follows, or an environment "
    "whose messages it accepts"
)


def check_template(encoder: Encoder, roles: Sequence[str]):
    """Refuses a chat template with which a conversation cannot continue after messages of these roles (user, tool).

    A turn must stay as it was when messages follow. How a turn with calls is worded is the template's choice: some
    write the calls alone.

    Raises:
        UsageError: the template rewrites earlier turns, drops thoughts, fails on such messages, does not end a turn
            with a special token, or what follows a turn depends on the turn.
    """
    if encoder.template is None:
        return
    for role in roles:
        for thoughts in _kinds_of_thoughts(encoder):
            _check(encoder, role, thoughts)


def _check(encoder: Encoder, role: str, thoughts: str | None):
    """Probes a conversation of two turns, each answered by messages of the role."""
    tools = _TOOLS if role == "tool" else None
    before: list[Message] = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    if _fails(encoder, before, tools):  # some templates have no system message
        before = before[1:]
    for number in range(2):
        before = _check_turn(encoder, role, before, _turn(role, thoughts, number), tools, number)
    last = _turn("user", thoughts, 2)
    if not _rendered(encoder, [*before, last], tools).startswith(_rendered(encoder, before, tools, opens=True)):
        raise _refusal(encoder, f"opens a turn after a {role} message with text that the turn does not keep")


def _check_turn(
    encoder: Encoder, role: str, before: list[Message], turn: Message, tools: list | None, number: int
) -> list[Message]:
    """Probes one turn after the messages `before`. Returns them with the turn and its answers."""
    answers = _answers(role, number)
    opened, shorter = _rendered(encoder, before, tools, opens=True), _rendered(encoder, [*before, turn], tools)
    longer = _rendered(encoder, [*before, turn, *answers], tools, opens=True)
    end = end_of_turn(encoder, shorter, len(_rendered(encoder, before, tools)))
    if end is None:
        raise _refusal(encoder, "ends an assistant's turn without a special token that ends a response")
    has_thoughts = _THOUGHT in turn["content"] or "reasoning_content" in turn
    if not longer.startswith(shorter[:end]):
        # A last turn without thoughts may be shown with empty ones, which the policy did not write.
        end = None if has_thoughts or not longer.startswith(opened) else end_of_turn(encoder, longer, len(opened))
    if end is None:
        drops = longer.count(_THOUGHT) < shorter.count(_THOUGHT)
        reason = f"(it drops the thoughts of an assistant's turn once a {role} message follows)"
        raise _refusal(encoder, f"rewrites earlier turns {reason if drops else f'before a {role} message'}")
    written = longer[:end].removeprefix(opened)
    if _THOUGHT in turn["content"] and _THOUGHT not in written and _ANSWER in written:
        raise _refusal(encoder, "rewrites turns (it drops the thoughts of an assistant's turn at once)")
    expected = encoder.template.encode_following([(longer[:end], longer[end:])])[0]
    if TurnTokens(encoder, len(longer)).bridge(answers) != expected:
        raise _refusal(encoder, f"makes what follows an assistant's turn depend on that turn, for a {role} message")
    return [*before, turn, *answers]


def _kinds_of_thoughts(encoder: Encoder) -> tuple[str | None, ...]:
    """Where turns may have thoughts; None: none. The opening of a turn may begin them for all, or end them for all."""
    opened = _rendered(encoder, [{"role": "user", "content": "q"}], None, opens=True).rstrip()
    if opened.endswith("</think>"):
        return (None,)
    return ("content", "reasoning_content") if opened.endswith("<think>") else ("content", "reasoning_content", None)


def _refusal(encoder: Encoder, reason: str) -> UsageError:
    return UsageError(f"{encoder.template.flag}: {reason}; {_ADVICE}")


def _rendered(encoder: Encoder, messages: Sequence[Message], tools: list | None, opens: bool = False) -> str:
    try:
        return encoder.template.render(messages, add_generation_prompt=opens, tools=tools)
    except UsageError as error:
        two = ", of two tool calls in one turn" if tools else ""
        raise UsageError(f"{error} (of a probe{two}); {_ADVICE}") from None


def _fails(encoder: Encoder, messages: Sequence[Message], tools: list | None) -> bool:
    try:
        _rendered(encoder, messages, tools)
    except UsageError:
        return True
    return False


def _turn(role: str, thoughts: str | None, number: int) -> Message:
    """A turn of the assistant; before messages of tools, with two calls at once."""
    turn: Message = {"role": "assistant", "content": f"{_ANSWER} {number}"}
    if thoughts == "content":
        turn["content"] = f"<think>\n{_THOUGHT}\n</think>\n\n{turn['content']}"
    elif thoughts:
        turn[thoughts] = _THOUGHT
    if role == "tool":
        turn["tool_calls"] = [
            {"id": f"call_{number}_{k}", "type": "function", "function": {"name": "probe", "arguments": {"x": k}}}
            for k in range(2)
        ]
    return turn


def _answers(role: str, number: int) -> list[Message]:
    if role != "tool":
        return [{"role": role, "content": f"b {number}"}]
    return [
        {"role": "tool", "tool_call_id": f"call_{number}_{k}", "name": "probe", "content": f"b {k}"} for k in range(2)
    ]
