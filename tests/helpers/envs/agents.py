"""Agents for runs of the small programs: the sums of `sum_environments` as a coroutine and as a program, and others.

Texts have only the characters of the small tokenizer: digits, + and =.
"""

import asyncio
import base64
import dataclasses
import random
import sys
from pathlib import Path
from types import SimpleNamespace

from megarl.environments.agents.program import ProgramEnvironment
from megarl.environments.protocol import Observation, Turn
from tests.helpers.envs.sum_environments import Sums

TURNS = 3


class LastSums(Sums):
    """As `Sums`, of a turn's content, with all of the reward at the end: as an agent has both."""

    def __init__(self):
        super().__init__()
        self._total = 0.0

    def step(self, turn: Turn) -> Observation:
        """An answer as of `Sums`."""
        seen = super().step(dataclasses.replace(turn, text=turn.content))
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
    return await _sums(task, client, "")


async def thinking_sums(task, client) -> float:
    """`sums` with thoughts before each turn, for the tokenizer of `thinkers`."""
    return await _sums(task, client, "<think>")


async def _sums(task, client, opening: str) -> float:
    """`opening`: of each turn but the first."""
    draws, messages, texts = random.Random(task.seed), list(task.messages), []
    for _ in range(TURNS):
        answer = await client.chat.completions.create(model="policy", messages=messages)
        choice = answer.choices[0]
        if choice.finish_reason == "length":
            return 0.0
        texts.append(choice.message.content)
        number = (draws.randrange(30) + len(texts[-1])) % 30
        asked = {"role": "user", "content": f"+{number}={opening}"}
        messages += [{"role": "assistant", "content": texts[-1]}, asked]
    return score_of(texts)


async def pictured_sums(task, client) -> float:
    """Shows a picture after each turn; a line's own is in its first message."""
    from tests.helpers.texts.picture_prompts import encoded, picture

    draws, messages, texts = random.Random(task.seed), list(task.messages), []
    for _ in range(TURNS):
        answer = await client.chat.completions.create(model="policy", messages=messages)
        texts.append(answer.choices[0].message.content)
        url = f"data:image/png;base64,{base64.b64encode(encoded(picture(64, 96, draws.randrange(3)))).decode()}"
        parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "+1="}]
        messages += [{"role": "assistant", "content": texts[-1]}, {"role": "user", "content": parts}]
    return score_of(texts)


class _Late:
    """A client whose requests begin after random times, which no seed decides, and are streamed."""

    def __init__(self, client):
        self._create = client.chat.completions.create
        self.chat = self.completions = self

    async def create(self, **fields):
        """The answer, joined from its stream."""
        await asyncio.sleep(random.SystemRandom().random() * 0.05)
        text, reason = "", None
        async for chunk in await self._create(**fields, stream=True):
            text += chunk.choices[0].delta.content or ""
            reason = chunk.choices[0].finish_reason or reason
        message = SimpleNamespace(role="assistant", content=text)
        return SimpleNamespace(choices=[SimpleNamespace(message=message, finish_reason=reason)])


async def late_sums(task, client) -> float:
    """As `sums`, at other times."""
    return await sums(task, _Late(client))


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


async def _turn(client, messages: list, limit: int | None = 3) -> str:
    limits = {} if limit is None else {"max_tokens": limit}
    answer = await client.chat.completions.create(model="policy", messages=messages, **limits)
    messages.append({"role": "assistant", "content": answer.choices[0].message.content})
    return messages[-1]["content"]


async def late_branching(task, client) -> float:
    """As `branching`, at other times."""
    return await branching(task, _Late(client))


async def stopping(task, client) -> float:
    """Two turns for the same prompt, which different texts end, then one that answers both."""
    asked = {"model": "policy", "messages": list(task.messages)}
    answers = [await client.chat.completions.create(**asked, stop=stop) for stop in ("7", ["1", "8"])]
    turns = [answer.choices[0].message for answer in answers]
    messages = [*task.messages, {"role": "assistant", "content": turns[1].content}, {"role": "user", "content": "+"}]
    last = await _turn(client, messages)
    return (turns[0].content + last).count("7") / 4 + len(turns[1].content) / 16


async def wandering(task, client) -> float:
    """One turn at a time: the prompt's row, one of another question, the first one again, and a short one."""
    draws, main = random.Random(task.seed), list(task.messages)
    texts = [await _turn(client, main, None)]
    aside = [{"role": "user", "content": f"{draws.randrange(9)}="}]
    texts.append(await _turn(client, aside, None))
    aside.append({"role": "user", "content": f"+{len(texts[-1])}="})
    texts.append(await _turn(client, aside, None))
    main.append({"role": "user", "content": f"+{len(texts[-1])}="})
    texts.append(await _turn(client, main, None))
    texts.append(await _turn(client, [{"role": "user", "content": f"{len(texts[-1])}="}], None))
    return "".join(texts).count("7") / 4 + len(texts[-1]) / 16


async def late_wandering(task, client) -> float:
    """As `wandering`, at other times."""
    return await wandering(task, _Late(client))


async def choices(task, client) -> float:
    """Two choices at a time."""
    answer = await client.chat.completions.create(model="policy", messages=list(task.messages), n=2)
    return float(len(answer.choices))
