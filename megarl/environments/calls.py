"""What is asked of environments and of the policy, and what is answered, between the processes of a replica.

A leader's pool sends a worker process a `Call`, and gets an `Answer`. The agent of a call asks the policy meanwhile:
an `Asked` goes to the leader, a `Replied` comes back. Drivers outside of the run get an `Offer` instead
(`session_pool.py`).
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from megarl.data.messages import arguments_of, tool_call
from megarl.environments.protocol import ImageBytes, Message, Observation, Task, ToolCall, Turn

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


class Call(NamedTuple):
    """What a worker is asked of the environment of an episode; a new one is made, and brought to where it was, if
    needed."""

    number: int  # of the episode
    ticket: int  # names the answer
    name: str  # of the environment
    task: Task
    turns: tuple[Turn, ...]  # the last one is to be answered; none: a reset
    observations: tuple[Observation, ...]  # answers to the turns before


class Offer(NamedTuple):
    """An episode that waits for a driver."""

    number: int
    ticket: int  # another one if it is offered again
    task: Task
    key: str | None  # of `key_of`: STEP/LINE/SAMPLE; None: it is one of an evaluation
    failures: int = 0  # of earlier drivers


class Close(NamedTuple):
    """An episode has ended: its environment, or its session, is no longer needed. There is no answer."""

    number: int


class Asked(NamedTuple):
    """What the agent, or the driver, of an episode asks the policy."""

    number: int  # of the episode
    ticket: int  # of the call or the offer: another one if the agent is run again
    request: int  # number of the request among the agent's
    ask: Ask
    images: ImageBytes = {}  # noqa: RUF012  # that the messages may name; never changed in place


class Replied(NamedTuple):
    """The policy's answer to an `Asked`."""

    number: int
    ticket: int
    request: int
    reply: Reply


class Answer(NamedTuple):
    """What a call or an offer has given: an observation, or the reason for a failure. The leader's pool adds the last
    fields, of all calls for this answer."""

    number: int  # of the episode
    ticket: int
    observation: Observation | None
    tools: list[dict]  # of a reset
    replayable: bool  # whether the episode may be played again: another environment can be brought to the same state
    seconds: float  # that the environment, the agent or the driver has taken; 0 from the journal
    failure: str | None = None  # why there is no observation, in a line
    is_late: bool = False
    is_agent: bool = False  # the observation is the end of an agent
    is_stuck: bool = False  # a thread still runs: this process must be replaced
    images: ImageBytes = {}  # noqa: RUF012  # of the observation; never changed in place
    turn: Turn | None = None  # that it answers; None: a reset
    replayed: int = 0  # how often the episode was played again
    late: int = 0  # how often of these the environment took too long
    from_journal: bool = False


def canonical(message: Mapping[str, Any]) -> str:
    """A message as text, equal for messages that a client may not tell apart.

    Clients drop or change the assistant's thoughts, ids of calls, and white space around the content.
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


# -- as JSON: between leaders and the HTTP process of sessions (`megarl.serving.links`) --------------------------------


def _offer(fields: list) -> Offer:
    number, ticket, task, key, failures = fields
    return Offer(number, ticket, Task(**{**task, "images": tuple(task["images"])}), key, failures)


def _asked(fields: list) -> Asked:
    number, ticket, request, (messages, tools, max_tokens, stops), _ = fields
    return Asked(number, ticket, request, Ask(messages, tools, max_tokens, tuple(stops)))


def _replied(fields: list) -> Replied:
    number, ticket, request, (turn, *others) = fields
    return Replied(number, ticket, request, Reply._make([None if turn is None else _turn(**turn), *others]))


def _turn(calls: list[dict[str, Any]], errors: list[str], **fields: Any) -> Turn:
    return Turn(calls=tuple(ToolCall(**call) for call in calls), errors=tuple(errors), **fields)


def _answer(fields: list) -> Answer:
    number, ticket, end, *others = fields
    return Answer._make([number, ticket, None if end is None else Observation(**end), *others])


# What makes a message of its fields.
FROM_LEADERS: dict[str, Callable[[list], Any]] = {"Offer": _offer, "Close": Close._make, "Replied": _replied}
TO_LEADERS: dict[str, Callable[[list], Any]] = {"Asked": _asked, "Answer": _answer}
