"""Checks what an environment returns: its code, and texts that a policy may have shaped, are not ours."""

import dataclasses
import json
from typing import Any

from megarl.environments.protocol import Observation
from megarl.measurements import parts_of, value_of
from megarl.plain_values import whole_unicode
from megarl.user_results import shown

ROLES = ("user", "system", "tool")
MAX_MESSAGES_LENGTH = 1 << 20  # characters, of all messages of an observation
_FIELDS = {"role", "content", "tool_call_id", "name"}


def checked(observation: Any, name: str = "") -> Observation:
    """The observation of the environment `name`, with plain numbers and valid Unicode.

    Raises:
        ValueError: what is wrong with it, in a line.
    """
    try:
        return _checked(observation)
    except ValueError as error:
        raise ValueError(f"{name}: {error}" if name else str(error)) from None


def _checked(observation: Any) -> Observation:
    if not isinstance(observation, Observation):
        raise ValueError(f"returned {type(observation).__name__}, not an Observation")
    reward, parts, correct = value_of("reward", observation.reward), parts_of(observation.parts), observation.correct
    if not isinstance(observation.messages, list):
        raise ValueError(f"messages are {type(observation.messages).__name__}, not a list")
    messages = [_message(message) for message in observation.messages]
    size = sum(len(json.dumps(message)) for message in messages)
    if size > MAX_MESSAGES_LENGTH:
        raise ValueError(f"the messages have {size:,} characters; allowed are {MAX_MESSAGES_LENGTH:,}")
    return dataclasses.replace(
        observation, messages=messages, reward=reward, done=bool(observation.done),
        correct=None if correct is None else bool(correct), parts=parts,
    )  # fmt: skip


def _message(message: Any) -> dict[str, str]:
    if not isinstance(message, dict) or not {"role", "content"} <= set(message) <= _FIELDS:
        raise ValueError("a message is an object with role, content and perhaps tool_call_id and name")
    if message["role"] not in ROLES:
        raise ValueError(f"a message has the role {shown(message['role'])}; allowed are {', '.join(ROLES)}"[:200])
    for name, value in message.items():
        if not isinstance(value, str):
            raise ValueError(f"{name} of a message is {type(value).__name__}, not text")
    return {name: whole_unicode(value) for name, value in message.items()}
