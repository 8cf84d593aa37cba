"""Checks what an environment returns: its code, and texts that a policy may have shaped, are not ours."""

import dataclasses
import json
from typing import Any

from megarl.environments.protocol import Observation
from megarl.numbers import is_finite
from megarl.user_results import number_of, shown

ROLES = ("user", "system", "tool")
MAX_MESSAGES_LENGTH = 1 << 20  # characters, of all messages of an observation
_FIELDS = {"role", "content", "tool_call_id", "name"}


def checked(observation: Any) -> Observation:
    """The observation with plain numbers and valid Unicode.

    Raises:
        ValueError: what is wrong with it, in a line.
    """
    if not isinstance(observation, Observation):
        raise ValueError(f"returned {type(observation).__name__}, not an Observation")
    reward, parts, correct = observation.reward, observation.parts, observation.correct
    if not isinstance(observation.messages, list):
        raise ValueError(f"messages are {type(observation.messages).__name__}, not a list")
    if not isinstance(parts, dict):
        raise ValueError(f"parts are {type(parts).__name__}, not a dict")
    for name, value in [("reward", reward), *parts.items()]:
        if not is_finite(number_of(value)):
            raise ValueError(f"{name} is {shown(value)}, not a finite number"[:200])
    messages = [_message(message) for message in observation.messages]
    size = sum(len(json.dumps(message)) for message in messages)
    if size > MAX_MESSAGES_LENGTH:
        raise ValueError(f"the messages have {size:,} characters; allowed are {MAX_MESSAGES_LENGTH:,}")
    return dataclasses.replace(
        observation, messages=messages, reward=number_of(reward), done=bool(observation.done),
        correct=None if correct is None else bool(correct),
        parts={str(name): number_of(value) for name, value in parts.items()},
    )  # fmt: skip


def _message(message: Any) -> dict[str, str]:
    if not isinstance(message, dict) or not {"role", "content"} <= set(message) <= _FIELDS:
        raise ValueError("a message is an object with role, content and perhaps tool_call_id and name")
    if message["role"] not in ROLES:
        raise ValueError(f"a message has the role {shown(message['role'])}; allowed are {', '.join(ROLES)}"[:200])
    for name, value in message.items():
        if not isinstance(value, str):
            raise ValueError(f"{name} of a message is {type(value).__name__}, not text")
    return {name: value.encode("utf-8", "replace").decode() for name, value in message.items()}
