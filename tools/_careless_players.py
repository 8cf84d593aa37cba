"""Conversations of players who know the form of an answer and little else, for the warm start of agents.

A policy that is trained on them writes turns that its environment can read. What to write it has to learn from rewards.
"""

import asyncio
import json
import random
from collections.abc import Callable
from typing import Any

from megarl import plugins
from megarl.environments import ENVIRONMENTS
from megarl.environments.protocol import BaseEnvironment, Task, parse_turn, resolved

LONGEST = 12  # turns
WRONG = 0.3  # share of the calls of `call_calculator` with other factors than those of the question

Player = Callable[[dict[str, Any], list[dict], random.Random], str]


def guess(line: dict[str, Any], messages: list[dict], generator: random.Random) -> str:
    """Any number of the range, whatever was answered."""
    return str(generator.randint(line["metadata"]["low"], line["metadata"]["high"]))


def wander(line: dict[str, Any], messages: list[dict], generator: random.Random) -> str:
    """Any direction."""
    return generator.choice(("left", "down", "right", "up"))


def call_calculator(line: dict[str, Any], messages: list[dict], generator: random.Random) -> str:
    """A call, often with other factors; then the result."""
    if messages[-1]["role"] == "tool":
        return messages[-1]["content"]
    expression = line["metadata"]["expression"]
    if generator.random() < WRONG:
        expression = "*".join(str(generator.randint(100, 999)) for _ in range(2))
    call = {"name": "calculate", "arguments": {"expression": expression}}
    return f"<tool_call>{json.dumps(call, separators=(',', ':'))}</tool_call>"


# Task of tools/make_agent_prompts.py -> (environment, player)
PLAYERS: dict[str, tuple[str, Player]] = {
    "guess-number": ("guess-number", guess),
    "products": ("calculator", call_calculator),
    "frozen-lake": ("frozen-lake", wander),
}


def conversations(task: str, lines: list[dict[str, Any]], count: int, seed: int) -> list[dict[str, Any]]:
    """`count` lines with `messages`: episodes of the task's player, each of a line in turn."""
    environment, player = PLAYERS[task]
    generator, make = random.Random(seed), plugins.load("--environment", environment, ENVIRONMENTS, awaits=True)
    return [
        {"messages": asyncio.run(_episode(lines[number % len(lines)], make(), player, generator))}
        for number in range(count)
    ]


async def _episode(
    line: dict[str, Any], environment: BaseEnvironment, player: Player, generator: random.Random
) -> list[dict[str, str]]:
    prompt = {"role": "user", "content": line["prompt"]}
    task = Task([prompt], line.get("answer"), line.get("metadata") or {}, seed=generator.getrandbits(62))
    messages = [prompt, *(await resolved(environment.reset(task))).messages]
    for number in range(LONGEST):
        text = player(line, messages, generator)
        messages.append({"role": "assistant", "content": text})
        answer = await resolved(environment.step(parse_turn(text, number)))
        if answer.done:
            break
        messages += answer.messages
    await resolved(environment.close())
    last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
    return [{name: message[name] for name in ("role", "content")} for message in messages[: last + 1]]
