"""Agents for runs of the small programs: the sums of `sum_environments` as a coroutine and as a program, and others.

Texts have only the characters of the small tokenizer: digits, + and =.
"""

import asyncio
import random
import sys
from pathlib import Path

from megarl.environments.agents.program import ProgramEnvironment
from megarl.environments.protocol import Observation, Turn
from tests.helpers.sum_environments import Sums

TURNS = 3


class LastSums(Sums):
    """As `Sums`, with all of the reward at the end, as an agent has it."""

    def __init__(self):
        super().__init__()
        self._total = 0.0

    def step(self, turn: Turn) -> Observation:
        """An answer as of `Sums`."""
        seen = super().step(turn)
        self._total += seen.reward
        return Observation(seen.messages, self._total if seen.done else 0.0, seen.done)


def score_of(texts: list[str]) -> float:
    """What `LastSums` gives for these turns."""
    total = 0.0
    for text in texts:
        total += text.count("7") / 4 + len(text) / 64
    return total


async def sums(task, client) -> float:
    """`LastSums` as an agent."""
    draws, messages, texts = random.Random(task.seed), list(task.messages), []
    for _ in range(TURNS):
        await pause()
        answer = await client.chat.completions.create(model="policy", messages=messages)
        choice = answer.choices[0]
        if choice.finish_reason == "length":
            return 0.0
        texts.append(choice.message.content)
        number = (draws.randrange(30) + len(texts[-1])) % 30
        messages += [{"role": "assistant", "content": texts[-1]}, {"role": "user", "content": f"+{number}="}]
    return score_of(texts)


async def pause():
    """Nothing; `late_sums` waits."""


async def late_sums(task, client) -> float:
    """As `sums`, after random times, which no seed decides, and with streams."""

    class Late:
        class chat:  # noqa: N801  # as the client's attribute
            class completions:  # noqa: N801
                @staticmethod
                async def create(**fields):
                    await asyncio.sleep(random.SystemRandom().random() * 0.05)
                    stream = await client.chat.completions.create(**fields, stream=True)
                    text, reason = "", None
                    async for chunk in stream:
                        text += chunk.choices[0].delta.content or ""
                        reason = chunk.choices[0].finish_reason or reason
                    return _Answer([_Choice(_Message(text), reason)])

    return await sums(task, Late)


class _Answer:
    def __init__(self, choices):
        self.choices = choices


class _Choice:
    def __init__(self, message, finish_reason):
        self.message, self.finish_reason = message, finish_reason


class _Message:
    def __init__(self, content):
        self.content = content


PROGRAM = Path(__file__).with_name("sums_program.py")


def program() -> ProgramEnvironment:
    """`LastSums` as a program of its own."""
    return ProgramEnvironment([sys.executable, str(PROGRAM), "{task}"], reward=_of_program)


def _of_program(run) -> float:
    assert run.status == 0, run.output
    texts = [message["content"] for message in run.conversations[-1] if message["role"] == "assistant"]
    return score_of(texts) if len(texts) == TURNS and not run.truncated else 0.0


async def branching(task, client) -> float:
    """One turn, two sub-agents at the same time, a turn after both, and one after the history was cut."""
    main = list(task.messages)
    first = await _turn(client, main)
    parts = await asyncio.gather(*(_sub_agent(client, str(number)) for number in (3, 4)))
    main.append({"role": "user", "content": "+".join(str(len(part)) for part in parts)})
    second = await _turn(client, main)
    last = await _turn(client, [{"role": "user", "content": f"{len(first + second)}="}])
    return (first + second + last + "".join(parts)).count("7") / 4 + len(last) / 8


async def _sub_agent(client, question: str) -> str:
    messages = [{"role": "user", "content": f"{question}="}]
    texts = [await _turn(client, messages)]
    messages.append({"role": "user", "content": "+1="})
    return texts[0] + await _turn(client, messages)


async def _turn(client, messages: list) -> str:
    await pause()
    answer = await client.chat.completions.create(model="policy", messages=messages, max_tokens=3)
    messages.append(answer.choices[0].message)
    return answer.choices[0].message.content


async def late_branching(task, client) -> float:
    """As `branching`, after random times, which no seed decides."""

    class Late:
        class chat:  # noqa: N801
            class completions:  # noqa: N801
                @staticmethod
                async def create(**fields):
                    await asyncio.sleep(random.SystemRandom().random() * 0.05)
                    return await client.chat.completions.create(**fields)

    return await branching(task, Late)
