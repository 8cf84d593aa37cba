"""What processes say to each other, as JSON; when two messages or requests count as the same."""

from megarl.data.messages import tool_call
from megarl.environments.calls import (
    FROM_LEADERS,
    TO_LEADERS,
    Answer,
    Ask,
    Asked,
    Close,
    Offer,
    Replied,
    Reply,
    canonical,
    digests,
)
from megarl.environments.protocol import Observation, Task, parse_turn
from megarl.serving import links

USER = [{"role": "user", "content": "a"}]
CALL = '<think>so</think>42 <tool_call>{"name": "add", "arguments": {"x": [1, "ä"]}}</tool_call>'


def sent(messages: list, kinds: links.Kinds) -> list:
    """Messages at the other end of a link."""
    return links.decode(links.packet(map(links.encode, messages)), kinds)


def test_messages_are_the_same_at_the_other_end():
    reply = Reply(parse_turn(CALL, 0), "stop", [1, 2], [3], [-0.5])
    refused = Reply(None, "stop", [], [], [], "too long", "context_length_exceeded", True)
    task = Task(USER, "5", {"level": [1]}, None, 7, 8)
    there = [Offer(1, 0, task, "4/9/1"), Replied(1, 0, 5, reply), Replied(1, 0, 6, refused), Close(1)]
    assert sent(there, FROM_LEADERS) == there
    end = Observation([], 1.0, True, True, {"tests": 0.5})
    back = [Asked(1, 0, 5, Ask(USER, None, 9, ("x",))), Answer(1, 0, end, [], True, 2.5, is_agent=True),
            Answer(1, 1, None, [], False, 0.0, "late", is_agent=True)]  # fmt: skip
    assert sent(back, TO_LEADERS) == back


def test_what_a_client_may_change_of_an_answer_does_not_count():
    message = Reply(parse_turn(CALL, 0)).message
    (call,) = message["tool_calls"]
    other = tool_call("another id", "add", ' {"x": [1, "ä"]} ')
    assert canonical(message) == canonical({"role": "assistant", "content": " 42\n", "tool_calls": [other]})
    assert canonical(message) != canonical({**message, "content": "43"}) and call["id"] != "another id"
    assert digests([*USER, message])[0] == digests(USER)[0] != digests(USER, [])[0]
    assert Ask(USER).key == Ask(list(USER)).key != Ask(USER, max_tokens=1).key
