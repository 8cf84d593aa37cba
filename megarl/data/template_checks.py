"""Checks at the start of a run that a conversation can continue with a chat template.

A template that renders an earlier turn in another way once more messages follow has the run train on what the policy
never sees when it is used. Probes render conversations with thoughts, tool calls and several turns.
"""

from collections.abc import Callable, Sequence

from megarl.data.conversations import Encoder
from megarl.data.messages import Message, tool_call
from megarl.data.turns import TurnTokens, end_after_empty_thoughts, end_of_last_turn
from megarl.errors import UsageError

CallId = Callable[[int, int], str]
_THOUGHT, _ANSWER = "thought", "reply"
_NUMBER = {"type": "integer", "description": "A number."}
_PARAMETERS = {"type": "object", "properties": {"x": _NUMBER}, "required": ["x"]}
_PROBE = {"name": "probe", "description": "A tool.", "parameters": _PARAMETERS}
_TOOLS = [{"type": "function", "function": _PROBE}]
_ADVICE = (
    "give a template (a Jinja file) that keeps earlier turns as they are and appends what follows, or an environment "
    "whose messages it accepts"
)


def check_template(encoder: Encoder, roles: Sequence[str], call_id: CallId = "call_{}_{}".format):
    """Refuses a chat template with which a conversation cannot continue after messages of these roles (user, tool).

    A turn must stay as it was when messages follow. How a turn with calls is worded is the template's choice: some
    write the calls alone, some only one call in a turn.

    `call_id`: the id of a call of an environment, of its turn and its number in the turn. UsageError: the template
    rewrites earlier turns, drops thoughts, fails on such messages, does not end a turn with a special token, or what
    follows a turn depends on the turn.
    """
    if encoder.template is None:
        return
    for role in roles:
        for thoughts in _kinds_of_thoughts(encoder):
            _check(encoder, role, thoughts, call_id)


def _check(encoder: Encoder, role: str, thoughts: str | None, call_id: CallId):
    tools = _TOOLS if role == "tool" else None
    before: list[Message] = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    if _fails(encoder, before, tools):  # some templates have no system message
        before = before[1:]
    ids = [[call_id(turn, index) for index in range(2)] for turn in range(3)]
    if role == "tool" and _fails(encoder, [*before, _turn(role, thoughts, 0, ids[0])], tools):
        ids = [each[:1] for each in ids]
    for number in range(2):
        turn = _turn(role, thoughts, number, ids[number])
        before = _check_turn(encoder, before, turn, _answers(role, number, ids[number]), tools)
    # Once the answer that ends the work follows, a template may drop the thoughts before it: no prompt has that answer.
    lasts = [_turn("user", thoughts, 2, []), _turn(role, thoughts, 2, ids[2])]
    opened = _rendered(encoder, before, tools, opens=True)
    if not any(_rendered(encoder, [*before, last], tools).startswith(opened) for last in lasts):
        raise _refusal(encoder, f"opens a turn after a {role} message with text that the turn does not keep")


def _check_turn(
    encoder: Encoder, before: list[Message], turn: Message, answers: list[Message], tools: list | None
) -> list[Message]:
    """Probes one turn after the messages `before`. Returns them with the turn and its answers."""
    role = answers[0]["role"]
    opened, shorter = _rendered(encoder, before, tools, opens=True), _rendered(encoder, [*before, turn], tools)
    longer = _rendered(encoder, [*before, turn, *answers], tools, opens=True)
    end, kept = end_of_last_turn(encoder, longer, shorter, len(_rendered(encoder, before, tools)))
    if end is None:
        raise _refusal(encoder, "ends an assistant's turn without a special token that ends a response")
    has_thoughts = _THOUGHT in turn["content"] or "reasoning_content" in turn
    if not longer.startswith(kept):
        end = end_after_empty_thoughts(encoder, longer, opened, has_thoughts)
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
        calls = sum(len(message.get("tool_calls", ())) for message in messages[-3:])
        what = f", of {calls} tool calls" if calls else ""
        raise UsageError(f"{error} (of a probe{what}); {_ADVICE}") from None


def _fails(encoder: Encoder, messages: Sequence[Message], tools: list | None) -> bool:
    try:
        _rendered(encoder, messages, tools)
    except UsageError:
        return True
    return False


def _turn(role: str, thoughts: str | None, number: int, ids: Sequence[str]) -> Message:
    """A turn of the assistant; before messages of tools, with calls of these ids."""
    turn: Message = {"role": "assistant", "content": f"{_ANSWER} {number}"}
    if thoughts == "content":
        turn["content"] = f"<think>\n{_THOUGHT}\n</think>\n\n{turn['content']}"
    elif thoughts:
        turn[thoughts] = _THOUGHT
    if role == "tool":
        turn["tool_calls"] = [tool_call(each, "probe", {"x": k}) for k, each in enumerate(ids)]
    return turn


def _answers(role: str, number: int, ids: Sequence[str]) -> list[Message]:
    if role != "tool":
        return [{"role": role, "content": f"b {number}"}]
    return [{"role": "tool", "tool_call_id": each, "name": "probe", "content": f"b {k}"} for k, each in enumerate(ids)]
