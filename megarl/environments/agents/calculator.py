"""`calculator-agent`: the environment `calculator` as an agent that owns the loop; both give the same bytes."""

import itertools
import json
from typing import Any

from megarl.environments.calculator import calculator
from megarl.environments.protocol import Task, ToolCall, Turn


async def calculator_agent(task: Task, client: Any) -> float:
    """Calls what the policy asks for until it calls nothing; 1 if the last number of the last turn is the answer."""
    tools, messages = calculator(), list(task.messages)
    tools.reset(task)
    for number in itertools.count():
        answer = await client.chat.completions.create(model="policy", messages=messages, tools=tools.tools)
        choice = answer.choices[0]
        if choice.finish_reason == "length":
            return 0.0
        seen = await tools.step(_turn_of(number, choice.message))
        if seen.done:
            return seen.reward
        messages += [choice.message, *(_with_id(message) for message in seen.messages)]
    raise AssertionError  # the loop has no end of its own


def _turn_of(number: int, message: Any) -> Turn:
    """What the policy wrote, as tools read it."""
    calls = tuple(
        ToolCall(call.id, call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()
    )
    errors = tuple(getattr(message, "tool_call_errors", None) or ())
    return Turn(number, message.content or "", content=message.content or "", calls=calls, errors=errors)


def _with_id(message: dict[str, Any]) -> dict[str, Any]:
    """OpenAI's schema wants an id of each result, also of calls that could not be read."""
    return {"tool_call_id": "unread", **message} if message["role"] == "tool" else message
