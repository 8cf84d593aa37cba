"""What the HTTP process of sessions and the leaders of the replicas say to each other (`megarl.serving.links`).

From a leader, about one of its episodes by its number:

- offer: number, ticket, task, group, sample, evaluation: the episode waits for a driver
- reply: number, ticket, request, reply: what the policy wrote for a request
- withdraw: number: the episode has ended

To a leader:

- asked: number, ticket, request, ask: what the driver asks the policy
- ended: number, ticket, observation or failure, retry (whether another driver may try), seconds (of the driver's work)
"""

import dataclasses
from typing import Any

from megarl.environments.agents.exchange import Ask, Reply
from megarl.environments.protocol import Task, ToolCall, Turn


def offer(number: int, ticket: int, task: Task, key: str | None) -> dict[str, Any]:
    """The message about an episode that begins. `key`: of `key_of`; None: it is one of an evaluation."""
    group, _, sample = (key or "").rpartition("/")
    return {
        "type": "offer", "number": number, "ticket": ticket, "task": dataclasses.asdict(task),
        "group": group or None, "sample": int(sample) if sample else None, "evaluation": key is None,
    }  # fmt: skip


def ask_of(data: dict[str, Any]) -> Ask:
    """A request of `Ask._asdict`, after JSON."""
    return Ask(data["messages"], data["tools"], data["max_tokens"], tuple(data["stops"]))


def reply_as_json(reply: Reply) -> dict[str, Any]:
    """A reply as plain data; `reply_of` reads it."""
    turn = None if reply.turn is None else dataclasses.asdict(reply.turn)
    return {**reply._asdict(), "turn": turn, "tokens": list(reply.tokens), "prompt": list(reply.prompt)}


def reply_of(data: dict[str, Any]) -> Reply:
    """The reply of `reply_as_json`."""
    turn = data["turn"]
    if turn is not None:
        calls = tuple(ToolCall(**call) for call in turn["calls"])
        turn = Turn(**{**turn, "calls": calls, "errors": tuple(turn["errors"])})
    return Reply(**{**data, "turn": turn})
