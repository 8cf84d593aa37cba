"""What an agent is: a coroutine of the user's, or a program (`program.py`); its episode ends with its score."""

import asyncio
import importlib.util
import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarl import bundled
from megarl.environments.agents.session import Session
from megarl.environments.protocol import Message, Observation, Task
from megarl.errors import UsageError
from megarl.plain_values import is_finite
from megarl.rewards.base import Score
from megarl.user_results import is_async, number_of, shown


@dataclass(frozen=True)
class AgentRun:
    """What an agent did: input of a program's reward function."""

    task: Task
    conversations: list[list[Message]] = field(default_factory=list)  # of each branch, with the last answer
    truncated: bool = False  # a budget of the run has refused a request, or cut the last turn
    status: int | None = None  # of a program, negative for a signal
    output: str = ""  # the last part of what a program printed
    workspace: Path | None = None  # of a program; it is removed after the reward

    @property
    def answer(self) -> str:
        """Of the last branch; "" without one."""
        return (self.conversations[-1][-1].get("content") or "") if self.conversations else ""


class Agent:
    """One episode of an agent. `--environment` names a function that returns one, or a coroutine function."""

    tools: list[dict[str, Any]] = []  # noqa: RUF012  # of the environment protocol; an agent's requests have their own
    replayable = True  # an episode whose worker died is run again
    seconds = 0.0  # of its own work, once it has ended

    async def run(self, task: Task, session: Session) -> Observation:
        """Runs the agent to its end, or until `session.spent`. Cancelling it ends all that it has started."""
        raise NotImplementedError

    async def close(self):
        """Frees what the episode holds; it may have ended at any point."""


class CoroutineAgent(Agent):
    """`async def agent(task, client)`: returns a number, a `Score` or an `Observation`."""

    def __init__(self, function: Callable[[Task, Any], Awaitable]):
        self._function = function

    async def run(self, task: Task, session: Session) -> Observation:
        """See Agent. An exception after a budget was used up ends the episode with 0: it is the client's error."""
        from megarl.environments.agents.in_process import client_of  # needs a package that no other agent does

        client = client_of(session)
        work = asyncio.ensure_future(self._function(task, client))
        spent = asyncio.create_task(session.spent.wait())
        try:
            await asyncio.wait((work, spent), return_when=asyncio.FIRST_COMPLETED)
            if work.done() and not (session.refused and work.exception()):
                return observation_of(work.result())
            return Observation(done=True, correct=False)
        finally:
            spent.cancel()
            work.cancel()


def check_packages(agent: Agent):
    """UsageError if a package is missing that the agent's endpoint or client needs."""
    needed = dict.fromkeys(("fastapi", "uvicorn"), bundled.install_command("serve"))
    needed |= {"openai": "pip install openai"} if isinstance(agent, CoroutineAgent) else {}
    for name, command in needed.items():
        if importlib.util.find_spec(name) is None:
            raise UsageError(f"agents need the package {name}: run {command}")


def as_agent(factory: Callable) -> Agent | None:
    """The agent of a coroutine function of (task, client); None if `factory` is none, but makes environments."""
    if not is_async(factory):
        return None
    names = list(inspect.signature(factory).parameters)
    if len(names) != 2:
        raise TypeError(f"a coroutine agent has two parameters (task, client), not {len(names)}")
    return CoroutineAgent(factory)


def observation_of(score: Any) -> Observation:
    """The end of an episode with this score. TypeError for a value that is none."""
    if isinstance(score, Observation):
        return Observation(score.messages, score.reward, True, score.correct, score.parts)
    if isinstance(score, Score):
        return Observation(reward=score.reward, done=True, correct=score.correct, parts=score.parts)
    if (number := number_of(score)) is not None and is_finite(number):
        return Observation(reward=number, done=True)
    raise TypeError(f"an agent's score is a number or a Score, not {shown(score)}")
