"""What a pool and its worker processes send each other."""

from typing import NamedTuple

from megarl.environments.agents.exchange import Ask, Reply
from megarl.environments.protocol import Observation, Task, Turn


class Call(NamedTuple):
    """What a worker is asked. A slot is one environment; a new one is made, and brought to where it was, if needed."""

    ticket: int  # names the answer
    slot: int
    name: str  # of the environment
    task: Task
    turns: tuple[Turn, ...]  # the last one is to be answered; none: a reset
    observations: tuple[Observation, ...]  # answers to the turns before


class Close(NamedTuple):
    """The environment of a slot is no longer needed; there is no answer."""

    slot: int


class AgentAsk(NamedTuple):
    """What the agent of a call asks the policy, from a worker."""

    ticket: int  # of the call that runs the agent
    number: int  # of the request among the agent's
    ask: Ask


class AgentReply(NamedTuple):
    """The policy's answer to an `AgentAsk`, to the worker."""

    ticket: int
    number: int
    reply: Reply


class Answer(NamedTuple):
    """What a call gave: an observation, or the reason for a failure."""

    ticket: int
    observation: Observation | None
    tools: list[dict]
    replayable: bool
    seconds: float
    failure: str | None = None
    is_late: bool = False
    is_agent: bool = False  # the observation is the end of an agent
    is_stuck: bool = False  # a thread still runs: this process must be replaced
